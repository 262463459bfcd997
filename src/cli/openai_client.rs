//! Prompts on a server that speaks OpenAI's API: LM Studio, ollama, llama.cpp, `anec serve`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use anec::base::{Diagnostic, Fault, Result};
use anec::runtime::bench::{BenchmarkCase, SuitePrompt};

/// Time that a server may be silent.
const PATIENCE: Duration = Duration::from_secs(600);
/// Maximum length of a line of a response, in bytes.
const MAX_LINE: u64 = 1 << 24;

/// Failure to measure a server.
#[derive(Debug, thiserror::Error)]
#[error("{url}: {problem}")]
struct ServerError {
    url: String,
    problem: String,
}

impl Diagnostic for ServerError {
    fn fault(&self) -> Fault {
        Fault::Platform
    }

    fn help(&self) -> Option<String> {
        Some("give the address of a running server, such as http://127.0.0.1:11434/v1".into())
    }
}

/// Server that speaks OpenAI's API.
pub(super) struct Server {
    url: String,
    authority: String,
    path: String,
}

impl Server {
    /// Parses `http://host:port[/v1]`.
    ///
    /// # Errors
    /// If the address has another scheme.
    pub(super) fn new(url: &str) -> Result<Self> {
        let wrong = |problem: &str| ServerError { url: url.to_owned(), problem: problem.to_owned() };
        let rest = url.strip_prefix("http://").ok_or_else(|| wrong("expected an address that begins with http://"))?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, "v1"));
        if authority.is_empty() || authority.contains('@') {
            return Err(wrong("it has no host").into());
        }
        let path = if path.is_empty() { "v1" } else { path.trim_end_matches('/') };
        let port = if authority.rsplit(']').next().is_some_and(|end| end.contains(':')) { "" } else { ":80" };
        Ok(Server { url: url.to_owned(), authority: format!("{authority}{port}"), path: format!("/{path}") })
    }

    fn error(&self, problem: impl ToString) -> ServerError {
        ServerError { url: self.url.clone(), problem: problem.to_string() }
    }

    /// Sends a request; returns the response's body once its status is 200.
    fn send(&self, method: &str, route: &str, body: &str) -> Result<Body> {
        let stream = TcpStream::connect(&self.authority).map_err(|error| self.error(error))?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(|error| self.error(error))?;
        let (path, host, length) = (&self.path, &self.authority, body.len());
        let head = format!(
            "{method} {path}{route} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n"
        );
        (&stream).write_all(format!("{head}{body}").as_bytes()).map_err(|error| self.error(error))?;
        let mut reader = BufReader::new(stream);
        let status = line(&mut reader).map_err(|error| self.error(error))?.unwrap_or_default();
        let mut chunked = false;
        while let Some(header) = line(&mut reader).map_err(|error| self.error(error))?.filter(|line| !line.is_empty()) {
            let header = header.to_ascii_lowercase();
            chunked |= header.starts_with("transfer-encoding:") && header.contains("chunked");
        }
        let mut body = Body { reader, chunked, left: 0, buffer: Vec::new() };
        if status.split(' ').nth(1) != Some("200") {
            let mut text = String::new();
            while let Some(line) = body.line().map_err(|error| self.error(error))? {
                text.push_str(&line);
            }
            let said: String = text.chars().take(200).collect();
            return Err(self.error(format!("{method} {path}{route}: {status} {said}")).into());
        }
        Ok(body)
    }

    /// Name of the server's first model.
    ///
    /// # Errors
    /// If the server can't be reached, or lists no model.
    pub(super) fn model(&self) -> Result<String> {
        let mut body = self.send("GET", "/models", "")?;
        let mut text = String::new();
        while let Some(line) = body.line().map_err(|error| self.error(error))? {
            text.push_str(&line);
        }
        let list: Json = serde_json::from_str(&text).map_err(|error| self.error(error))?;
        let name = list["data"][0]["id"].as_str().map(str::to_owned);
        Ok(name.ok_or_else(|| self.error("it lists no model"))?)
    }

    /// Continues a prompt by the most likely tokens, and measures.
    ///
    /// # Errors
    /// If the server can't be reached, refuses the request or breaks off.
    pub(super) fn run(&self, model: &str, of: &SuitePrompt) -> Result<BenchmarkCase> {
        let request = json!({
            "model": model,
            "messages": [{"role": "user", "content": of.prompt}],
            "max_tokens": of.max_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let start = Instant::now();
        let mut body = self.send("POST", "/chat/completions", &request.to_string())?;
        let (mut text, mut pieces, mut first) = (String::new(), 0usize, None);
        let (mut prompt_tokens, mut gen_tokens) = (0, None);
        while let Some(line) = body.line().map_err(|error| self.error(error))? {
            let Some(data) = line.strip_prefix("data:").map(str::trim).filter(|data| *data != "[DONE]") else {
                continue;
            };
            let event: Json = serde_json::from_str(data).map_err(|error| self.error(error))?;
            if let Some(message) = event["error"]["message"].as_str() {
                return Err(self.error(message).into());
            }
            if let Some(piece) = event["choices"][0]["delta"]["content"].as_str().filter(|piece| !piece.is_empty()) {
                first.get_or_insert_with(Instant::now);
                text.push_str(piece);
                pieces += 1;
            }
            if let Some(usage) = event["usage"].as_object() {
                let count = |key: &str| usage.get(key).and_then(Json::as_u64).map(|count| count as usize);
                (prompt_tokens, gen_tokens) = (count("prompt_tokens").unwrap_or(0), count("completion_tokens"));
            }
        }
        let end = Instant::now();
        let first = first.ok_or_else(|| self.error("it sent no text"))?;
        let (to_first, rest) = ((first - start).as_secs_f64(), (end - first).as_secs_f64());
        let gen_tokens = gen_tokens.unwrap_or(pieces);
        Ok(BenchmarkCase {
            name: of.name.clone(),
            runs: 1,
            prompt_tokens,
            gen_tokens,
            prefill_tps: prompt_tokens as f64 / to_first,
            decode_tps: if gen_tokens > 1 { (gen_tokens - 1) as f64 / rest.max(1e-9) } else { 0.0 },
            decode_spread_tps: 0.0,
            same_text: true,
            ttft_ms: to_first * 1e3,
            inference_ms: (end - start).as_secs_f64() * 1e3,
            text,
        })
    }
}

/// Body of a response, read line by line.
struct Body {
    reader: BufReader<TcpStream>,
    chunked: bool,
    /// Bytes left of the current chunk.
    left: usize,
    buffer: Vec<u8>,
}

impl Body {
    /// Next line without its end; `None` at the end of the body.
    fn line(&mut self) -> std::io::Result<Option<String>> {
        if !self.chunked {
            return line(&mut self.reader);
        }
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned()));
            }
            if self.left == 0 {
                let size = line(&mut self.reader)?.unwrap_or_default();
                let size = usize::from_str_radix(size.split(';').next().unwrap_or_default().trim(), 16).unwrap_or(0);
                if size == 0 || self.buffer.len() + size > MAX_LINE as usize {
                    let rest = std::mem::take(&mut self.buffer);
                    return Ok((!rest.is_empty()).then(|| String::from_utf8_lossy(&rest).into_owned()));
                }
                self.left = size;
            }
            let mut part = vec![0; self.left];
            self.reader.read_exact(&mut part)?;
            self.buffer.extend(part);
            self.left = 0;
            // the line end behind a chunk
            line(&mut self.reader)?;
        }
    }
}

fn line(reader: &mut BufReader<TcpStream>) -> std::io::Result<Option<String>> {
    let mut bytes = Vec::new();
    reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes)?;
    Ok((!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).trim_end_matches(['\r', '\n']).to_owned()))
}
