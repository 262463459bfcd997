//! `anec serve`

use std::collections::BTreeSet;
use std::iter::repeat;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::io::BufReader;
use tokio::net::TcpListener;
#[cfg(unix)]
use tokio_io_timeout::TimeoutWriter;

use super::draft::DraftArgs;
use super::model::{Runner, TEXT_PRECISION};
use super::usage::{ThreadError, UsageError};
use anec::base::Result;
use anec::serve::{self, HttpOptions, Models, ModelsOptions, OpenModel, ServeError, ServeLimits, Service, json_lines};

/// Serve models over HTTP (APIs of OpenAI, Anthropic, Ollama), or one as JSON lines
///
/// The address itself shows a chat page. Only this machine can connect unless --host allows others. Of several models,
/// the `model` of a request chooses one, which is loaded when it is needed.
#[derive(Debug, clap::Args)]
#[command(mut_arg("precision", TEXT_PRECISION))]
pub struct ServeArgs {
    #[command(flatten)]
    runner: Runner,
    /// Further models
    #[arg(value_name = "MODEL", conflicts_with_all = ["stdin", "socket", "draft", "strict_model"])]
    more: Vec<PathBuf>,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", conflicts_with_all = ["stdin", "socket"])]
    host: IpAddr,
    /// Port to listen on; 0 chooses a free one
    #[arg(long, value_name = "N", default_value_t = 8000, conflicts_with_all = ["stdin", "socket"])]
    port: u16,
    /// Serve JSON lines on this Unix socket instead
    #[arg(long, value_name = "PATH", conflicts_with = "stdin")]
    socket: Option<PathBuf>,
    /// Serve JSON lines on stdin and stdout instead
    #[arg(long)]
    stdin: bool,
    /// Model name for clients, once for each model [default: the bundle's]
    #[arg(long, value_name = "NAME")]
    name: Vec<String>,
    /// Unload a model after this time without requests [default: never for one model, 300 for several]
    #[arg(long, value_name = "S", conflicts_with_all = ["stdin", "socket"])]
    unload_after: Option<u64>,
    /// Number of models in memory at the same time; the longest idle makes room [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), requires = "more")]
    max_loaded: Option<u16>,
    /// Number of requests processed at the same time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    parallel: u16,
    /// Number of waiting requests; more get status 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    queue: u16,
    /// Number of conversations whose states are kept for their next request
    #[arg(long, value_name = "N", default_value_t = 4)]
    kept: u16,
    /// Time limit of an answer, waiting included
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Maximum size of a request
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = clap::value_parser!(u32).range(1..))]
    max_body: u32,
    /// API key that clients have to send
    #[arg(long, value_name = "KEY", env = API_KEY, hide_env_values = true, value_parser = api_key)]
    api_key: Option<String>,
    /// Allow web pages of this origin; `*` for all; repeatable
    #[arg(long, value_name = "ORIGIN", value_parser = origin, conflicts_with_all = ["stdin", "socket"])]
    cors: Vec<String>,
    /// Answer under this host name too; repeatable
    #[arg(long, value_name = "NAME", conflicts_with_all = ["stdin", "socket"])]
    allow_host: Vec<String>,
    /// Refuse requests that name another model
    #[arg(long, conflicts_with_all = ["stdin", "socket"])]
    strict_model: bool,
    /// Draft up to N tokens from a text itself and verify them in one call; the output stays the same
    #[arg(long, value_name = "N", default_value_t = 0)]
    speculation: u16,
    #[command(flatten)]
    draft: DraftArgs,
}

/// Default of `--unload-after` for several models, in seconds.
const UNLOAD_AFTER: u64 = 300;
/// Environment variable with the default of `--api-key`.
const API_KEY: &str = "ANEC_API_KEY";

/// Parses an API key.
fn api_key(text: &str) -> Result<String, String> {
    match text {
        "" => Err("the key is empty".into()),
        text if !text.bytes().all(|byte| byte.is_ascii_graphic()) => {
            Err("expected printable ASCII without spaces, because clients can't send other keys".into())
        }
        text => Ok(text.to_owned()),
    }
}

/// Parses an origin in the form that browsers send (scheme, host, non-default port), or `*`.
fn origin(text: &str) -> Result<String, String> {
    let host = text.split_once("://").map(|(_, host)| host);
    let good = |host: &str| !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
    match text == "*" || text == "null" || host.is_some_and(good) {
        true => Ok(text.to_owned()),
        false => Err("expected an origin such as https://example.org or http://localhost:3000, without a path".into()),
    }
}

impl ServeArgs {
    pub(super) fn run(self) -> Result<u8> {
        self.check_key()?;
        let more = self.more.iter().map(|path| self.runner.another(path));
        let runners: Vec<Runner> = [self.runner.clone()].into_iter().chain(more).collect();
        if !self.name.is_empty() && self.name.len() != runners.len() {
            let problem = format!("there are {} models and {} names", runners.len(), self.name.len());
            return Err(UsageError::new(problem, "give --name once for each model, or leave it out").into());
        }
        let names = self.name.iter().cloned().map(Some).chain(repeat(None));
        let mut open: Vec<OpenModel> =
            runners.into_iter().zip(names).map(|(runner, name)| self.open(runner, name)).collect();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            // leave the processors to the model
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(ThreadError)?;
        let done = runtime.block_on(async {
            if !self.stdin && self.socket.is_none() {
                return self.http(self.models(open)?).await;
            }
            let Some(open) = open.pop() else { return Ok(()) };
            let service = open(&Arc::default())?;
            service.load();
            match &self.socket {
                Some(path) => self.socket(service, path).await,
                None => self.stdin(service).await,
            }
        });
        // don't wait for a thread that reads stdin
        runtime.shutdown_background();
        done.map(|()| 0)
    }

    /// Returns what opens a model, now and after each unload.
    fn open(&self, runner: Runner, name: Option<String>) -> OpenModel {
        let (draft, limits, speculation) = (self.draft.clone(), self.limits(), self.speculation.into());
        // a name of the hub is looked up once
        let found: OnceLock<Runner> = OnceLock::new();
        Box::new(move |metrics| {
            let model = found.get().unwrap_or(&runner).open()?;
            found.get_or_init(|| runner.another(model.folder()));
            let name = name.clone().unwrap_or_else(|| model.bundle().name.clone());
            let draft = draft.load(&runner, &model)?;
            Service::new(model, name, runner.device(), limits, speculation, draft, metrics.clone())
        })
    }

    fn limits(&self) -> ServeLimits {
        let mut limits = ServeLimits::default();
        limits.parallel = self.parallel.into();
        limits.queue = self.queue.into();
        limits.kept = self.kept.into();
        limits.timeout = Duration::from_secs(self.timeout);
        limits
    }

    /// Opens the models, whose names must differ.
    fn models(&self, open: Vec<OpenModel>) -> Result<Arc<Models>> {
        let several = open.len() > 1;
        let mut options = ModelsOptions::default();
        options.unload_after = self.unload_after.or(several.then_some(UNLOAD_AFTER)).map(Duration::from_secs);
        options.max_loaded = self.max_loaded.map_or(options.max_loaded, usize::from);
        options.limits = self.limits();
        let models = Models::new(open, options)?;
        let mut names = BTreeSet::new();
        if let Some(twice) = models.names().find(|name| !names.insert(*name)) {
            let problem = format!("two models have the name {twice}");
            return Err(UsageError::new(problem, "give each model another name with --name").into());
        }
        drop(names);
        Ok(models)
    }

    /// Rejects `--api-key` for JSON lines. A key from the environment may be meant for another server.
    fn check_key(&self) -> Result<()> {
        let lines = self.stdin || self.socket.is_some();
        if lines && self.api_key.is_some() && self.api_key != std::env::var(API_KEY).ok() {
            let problem = "--api-key applies to HTTP only";
            return Err(UsageError::new(problem, "leave it out: only the socket's owner can connect").into());
        }
        Ok(())
    }

    async fn http(&self, models: Arc<Models>) -> Result<()> {
        let address = format!("{}:{}", self.host, self.port);
        let listen = |error| ServeError::Listen { address: address.clone(), error };
        let listener = TcpListener::bind((self.host, self.port)).await.map_err(listen)?;
        let own = listener.local_addr().map_err(listen)?;
        if !self.host.is_loopback() && self.api_key.is_none() {
            eprintln!("warning: anybody who can reach {own} can use the model; set --api-key to require a key");
        }
        let names: Vec<&str> = models.names().collect();
        eprintln!("{} on {}: http://{own}", names.join(", "), self.runner.device());
        let mut options = HttpOptions::default();
        options.api_key = self.api_key.clone();
        options.cors = self.cors.clone();
        options.allow_hosts = self.allow_host.clone();
        options.strict_model = self.strict_model;
        options.max_body = self.max_body as usize;
        serve::serve(models, listener, options, shutdown_signal).await;
        Ok(())
    }

    async fn stdin(&self, service: Arc<Service>) -> Result<()> {
        super::print(&json_lines::ready("stdin", None));
        let served = json_lines::serve(
            service,
            BufReader::new(tokio::io::stdin()),
            tokio::io::stdout(),
            self.max_body as usize,
            None,
        );
        tokio::select! {
            // a closed stdout is no error
            _ = served => {}
            () = shutdown_signal() => {}
        }
        Ok(())
    }

    #[cfg(unix)]
    async fn socket(&self, service: Arc<Service>, path: &std::path::Path) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let listen = |error| ServeError::Socket { path: path.to_owned(), error };
        // remove a socket that no server answers on
        if std::os::unix::net::UnixStream::connect(path).is_err() && is_socket(path) {
            std::fs::remove_file(path).map_err(listen)?;
        }
        let listener = tokio::net::UnixListener::bind(path).map_err(listen)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(listen)?;
        super::print(&json_lines::ready("unix-socket", Some(path)));
        let HttpOptions { connections, read_timeout, write_timeout, .. } = HttpOptions::default();
        let places = Arc::new(tokio::sync::Semaphore::new(connections));
        let accept = async {
            loop {
                let place = places.clone().acquire_owned().await;
                let Ok((stream, _)) = listener.accept().await else { continue };
                let (service, limit) = (service.clone(), self.max_body as usize);
                tokio::spawn(async move {
                    let (reader, writer) = stream.into_split();
                    let mut writer = TimeoutWriter::new(writer);
                    writer.set_timeout(Some(write_timeout));
                    let writer = Box::pin(writer);
                    // ignore client disconnects
                    let _ = json_lines::serve(service, BufReader::new(reader), writer, limit, Some(read_timeout)).await;
                    drop(place);
                });
            }
        };
        tokio::select! {
            () = accept => {}
            () = shutdown_signal() => {}
        }
        let _ = std::fs::remove_file(path);
        Ok(())
    }

    #[cfg(not(unix))]
    async fn socket(&self, _: Arc<Service>, path: &std::path::Path) -> Result<()> {
        let error = std::io::ErrorKind::Unsupported.into();
        Err(ServeError::Socket { path: path.to_owned(), error }.into())
    }
}

#[cfg(unix)]
fn is_socket(path: &std::path::Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

/// Waits for Ctrl-C or SIGTERM.
async fn shutdown_signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_origins_are_checked() {
        assert_eq!(api_key("sk-1234"), Ok("sk-1234".into()));
        assert!(["", " ", " key", "key ", "a b", "ké"].iter().all(|key| api_key(key).is_err()));
        assert!(["*", "https://example.org", "http://localhost:3000", "null"].iter().all(|text| origin(text).is_ok()));
        assert!(
            ["not an origin", "example.org", "https://", "https://a/b", ""].iter().all(|text| origin(text).is_err())
        );
    }
}
