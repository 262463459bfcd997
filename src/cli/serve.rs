//! `anec serve`

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::BufReader;
use tokio::net::TcpListener;
#[cfg(unix)]
use tokio_io_timeout::TimeoutWriter;

use super::draft::DraftArgs;
use super::model::{Runner, TEXT_PRECISION};
use super::usage::{ThreadError, UsageError};
use anec::base::Result;
use anec::serve::{self, HttpOptions, ServeError, ServeLimits, Service, json_lines};

/// Answers requests: over HTTP as OpenAI's API has it, or as JSON lines.
///
/// A page to chat with the model is at the address itself. Only this machine can connect unless --host says otherwise.
#[derive(Debug, clap::Args)]
#[command(mut_arg("precision", TEXT_PRECISION))]
pub struct ServeArgs {
    #[command(flatten)]
    runner: Runner,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", conflicts_with_all = ["stdin", "socket"])]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8000, conflicts_with_all = ["stdin", "socket"])]
    port: u16,
    /// Takes JSON lines on this Unix socket instead
    #[arg(long, value_name = "PATH", conflicts_with = "stdin")]
    socket: Option<PathBuf>,
    /// Takes JSON lines on stdin instead, and answers on stdout
    #[arg(long)]
    stdin: bool,
    /// Name of the model for clients; the bundle's own if not given
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Texts that are written at the same time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    parallel: u16,
    /// Texts that wait; further requests are refused with 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    queue: u16,
    /// Conversations whose states are kept for their next request
    #[arg(long, value_name = "N", default_value_t = 4)]
    kept: u16,
    /// Seconds for an answer, waiting included
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Seconds in which a request has to arrive
    #[arg(long, value_name = "S", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    #[arg(conflicts_with_all = ["stdin", "socket"])]
    read_timeout: u64,
    /// Seconds in which a client has to take something of what is written to it
    #[arg(long, value_name = "S", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    #[arg(conflicts_with = "stdin")]
    write_timeout: u64,
    /// Seconds for unfinished answers when the server is told to end
    #[arg(long, value_name = "S", default_value_t = 30, conflicts_with_all = ["stdin", "socket"])]
    grace: u64,
    /// Most bytes of a request
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = clap::value_parser!(u32).range(1..))]
    max_body: u32,
    /// Connections at the same time
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..))]
    #[arg(conflicts_with = "stdin")]
    connections: u16,
    /// Key that clients have to send
    #[arg(long, value_name = "KEY", env = API_KEY, hide_env_values = true, value_parser = api_key)]
    api_key: Option<String>,
    /// Lets web pages of this origin use the server; `*` for all; can be given several times
    #[arg(long, value_name = "ORIGIN", value_parser = origin, conflicts_with_all = ["stdin", "socket"])]
    cors: Vec<String>,
    /// Guesses up to N tokens from a text's own past and checks them in one call; the text stays the same
    #[arg(long, value_name = "N", default_value_t = 0)]
    speculation: u16,
    #[command(flatten)]
    draft: DraftArgs,
}

/// The variable of the environment that has the key, where none is given.
const API_KEY: &str = "ANEC_API_KEY";

/// A key that clients can send.
fn api_key(text: &str) -> Result<String, String> {
    match text {
        "" => Err("an empty key would keep everybody out".into()),
        text if !text.bytes().all(|byte| byte.is_ascii_graphic()) => {
            Err("a key has letters, digits and signs, and no spaces: clients couldn't send others".into())
        }
        text => Ok(text.to_owned()),
    }
}

/// `*`, or an origin as browsers tell it: scheme, host, and a port that isn't the usual one.
fn origin(text: &str) -> Result<String, String> {
    let host = text.split_once("://").map(|(_, host)| host);
    let good = |host: &str| !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
    match text == "*" || text == "null" || host.is_some_and(good) {
        true => Ok(text.to_owned()),
        false => Err("an origin is like https://example.org or http://localhost:3000, without a path".into()),
    }
}

impl ServeArgs {
    pub(super) fn run(self) -> Result<u8> {
        self.check_key()?;
        let model = self.runner.open()?;
        let name = self.name.clone().unwrap_or_else(|| model.bundle().name.clone());
        let limits = ServeLimits {
            parallel: self.parallel.into(),
            queue: self.queue.into(),
            kept: self.kept.into(),
            timeout: Duration::from_secs(self.timeout),
        };
        let draft = self.draft.load(&self.runner, &model)?;
        let service = Service::new(model, name, self.runner.device(), limits, self.speculation.into(), draft)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            // the model needs the processors
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(ThreadError)?;
        let done = runtime.block_on(async {
            match &self.socket {
                Some(path) => self.socket(service, path).await,
                None if self.stdin => self.stdin(service).await,
                None => self.http(service).await,
            }
        });
        // a thread that still waits for stdin is no reason to stay
        runtime.shutdown_background();
        done.map(|()| 0)
    }

    /// Refuses a key where none is asked for. One in the environment may be there for other servers.
    fn check_key(&self) -> Result<()> {
        let lines = self.stdin || self.socket.is_some();
        if lines && self.api_key.is_some() && self.api_key != std::env::var(API_KEY).ok() {
            let problem = "--api-key is for HTTP: who sends JSON lines is asked for no key";
            return Err(UsageError::new(problem, "leave it out: only its owner can connect to a socket").into());
        }
        Ok(())
    }

    async fn http(&self, service: Arc<Service>) -> Result<()> {
        let address = format!("{}:{}", self.host, self.port);
        let listen = |error| ServeError::Listen { address: address.clone(), error };
        let listener = TcpListener::bind((self.host, self.port)).await.map_err(listen)?;
        let own = listener.local_addr().map_err(listen)?;
        if !self.host.is_loopback() && self.api_key.is_none() {
            eprintln!("warning: anybody who reaches {own} can use the model; --api-key asks for a key");
        }
        eprintln!("{} on {}: http://{own}", service.name, service.device);
        let options = HttpOptions {
            api_key: self.api_key.clone(),
            cors: self.cors.clone(),
            max_body: self.max_body as usize,
            read_timeout: Duration::from_secs(self.read_timeout),
            write_timeout: Duration::from_secs(self.write_timeout),
            connections: self.connections.into(),
            grace: Duration::from_secs(self.grace),
        };
        serve::serve(service, listener, options, told_to_end()).await;
        Ok(())
    }

    async fn stdin(&self, service: Arc<Service>) -> Result<()> {
        super::print(&json_lines::ready("stdin", None));
        let served =
            json_lines::serve(service, BufReader::new(tokio::io::stdin()), tokio::io::stdout(), self.max_body as usize);
        tokio::select! {
            // a reader of the answers that went away is no error
            _ = served => {}
            () = told_to_end() => {}
        }
        Ok(())
    }

    #[cfg(unix)]
    async fn socket(&self, service: Arc<Service>, path: &std::path::Path) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let listen = |error| ServeError::Socket { path: path.to_owned(), error };
        // a socket that a server left behind is nobody's; one that answers is another's
        if std::os::unix::net::UnixStream::connect(path).is_err() && is_socket(path) {
            std::fs::remove_file(path).map_err(listen)?;
        }
        let listener = tokio::net::UnixListener::bind(path).map_err(listen)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(listen)?;
        super::print(&json_lines::ready("unix-socket", Some(path)));
        let places = Arc::new(tokio::sync::Semaphore::new(self.connections.into()));
        let accept = async {
            loop {
                let place = places.clone().acquire_owned().await;
                let Ok((stream, _)) = listener.accept().await else { continue };
                let patience = Duration::from_secs(self.write_timeout);
                let (service, limit) = (service.clone(), self.max_body as usize);
                tokio::spawn(async move {
                    let (reader, writer) = stream.into_split();
                    let mut writer = TimeoutWriter::new(writer);
                    writer.set_timeout(Some(patience));
                    let writer = Box::pin(writer);
                    // a client that breaks off is no matter of ours
                    let _ = json_lines::serve(service, BufReader::new(reader), writer, limit).await;
                    drop(place);
                });
            }
        };
        tokio::select! {
            () = accept => {}
            () = told_to_end() => {}
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

/// Waits for Ctrl-C, or the signal that asks a process to end.
async fn told_to_end() {
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
    fn keys_can_be_sent_and_origins_be_told() {
        assert_eq!(api_key("sk-1234"), Ok("sk-1234".into()));
        assert!(["", " ", " key", "key ", "a b", "ké"].iter().all(|key| api_key(key).is_err()));
        assert!(["*", "https://example.org", "http://localhost:3000", "null"].iter().all(|text| origin(text).is_ok()));
        assert!(
            ["not an origin", "example.org", "https://", "https://a/b", ""].iter().all(|text| origin(text).is_err())
        );
    }
}
