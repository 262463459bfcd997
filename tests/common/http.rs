//! HTTP client that sends any bytes, valid or not, and a test server.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value as Json;

use crate::common::folder::anec;

/// `anec serve` on a free port; ends with its test.
pub struct Server {
    child: Child,
    pub address: String,
}

impl Server {
    /// Starts it for a bundle.
    pub fn start(bundle: &Path, options: &[&str]) -> Self {
        let mut command = anec();
        command.arg("serve").arg(bundle).args(["--port", "0"]).args(options).env_remove("ANEC_API_KEY");
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = loop {
            let line = lines.next().expect("the server says where it listens").unwrap();
            if let Some((_, address)) = line.split_once("http://") {
                break address.to_owned();
            }
        };
        // what else it says must not fill the pipe
        std::thread::spawn(move || lines.for_each(|line| eprintln!("server: {}", line.unwrap_or_default())));
        let server = Server { child, address };
        loop {
            let health = server.get("/health");
            if health.status == 200 {
                return server;
            }
            assert!(!health.text().contains("\"failed\""), "{}", health.text());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    }

    /// Sends bytes and reads the answer to its end.
    pub fn raw(&self, bytes: &[u8]) -> Reply {
        let mut stream = self.connect();
        // a server that refuses early needn't read all
        let _ = stream.write_all(bytes);
        Reply::read(stream)
    }

    pub fn get(&self, path: &str) -> Reply {
        self.raw(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes())
    }

    pub fn post(&self, path: &str, body: &Json) -> Reply {
        self.raw(post(path, &body.to_string(), "").as_bytes())
    }

    /// Answer to a request that must succeed.
    pub fn ask(&self, path: &str, body: &Json) -> Json {
        let reply = self.post(path, body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// A completion that must succeed.
    pub fn complete(&self, body: Json) -> Json {
        self.ask("/v1/completions", &body)
    }

    /// A chat that must succeed.
    pub fn chat(&self, body: Json) -> Json {
        self.ask("/v1/chat/completions", &body)
    }

    /// A number of the metrics.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find(|line| line.split(' ').next() == Some(name));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until a number of the metrics is as wanted.
    pub fn wait_for(&self, name: &str, wanted: impl Fn(f64) -> bool) {
        for _ in 0..600 {
            if wanted(self.metric(name)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("{name} stays {}", self.metric(name));
    }

    /// Processor time of all its threads so far, in ticks of the system's clock, of which a second has a hundred.
    #[cfg(target_os = "linux")]
    pub fn ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // the name, in parentheses, may hold anything; the times in user and kernel mode are the 12th and 13th field
        // after it
        let fields = stat.rsplit(')').next().unwrap().split_whitespace();
        fields.skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum()
    }

    /// Asks the process to end.
    pub fn terminate(&self) {
        let status = std::process::Command::new("/bin/kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(status.success());
    }

    /// Waits for the end of the process; returns its exit code.
    pub fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A request as bytes.
pub fn post(path: &str, body: &str, headers: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
    )
}

/// An answer.
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn read(stream: TcpStream) -> Self {
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
                break;
            }
            head.push_str(&line);
        }
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        let mut body = Vec::new();
        if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
            loop {
                let mut size = String::new();
                if reader.read_line(&mut size).unwrap_or(0) == 0 {
                    break;
                }
                let size = usize::from_str_radix(size.trim(), 16).unwrap();
                let mut chunk = vec![0; size + 2];
                reader.read_exact(&mut chunk).unwrap();
                if size == 0 {
                    break;
                }
                body.extend_from_slice(&chunk[..size]);
            }
        } else {
            let _ = reader.read_to_end(&mut body);
        }
        Reply { status, head, body }
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> Json {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The `code` of an error.
    pub fn code(&self) -> Json {
        self.json()["error"]["code"].clone()
    }

    /// The parts of a streamed answer; it must end as it should.
    pub fn parts(&self) -> Vec<Json> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert!(self.head.contains("text/event-stream"), "{}", self.head);
        let text = self.text();
        let data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        let (last, parts) = data.split_last().unwrap();
        assert_eq!(*last, "[DONE]");
        parts.iter().map(|part| serde_json::from_str(part).unwrap()).collect()
    }
}
