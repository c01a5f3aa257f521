//! A client that keeps its connection open and can send file descriptors.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Value;

/// The most descriptors that a test sends.
pub(crate) const MOST_FDS: usize = 4;

/// A connection.
pub(crate) struct Client(UnixStream);

/// A reply.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    /// The status code.
    pub status: u16,
    /// The body; null if there is none.
    pub body: Value,
}

impl Client {
    /// Connects to the socket at `path`.
    pub(crate) fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self(stream)
    }

    /// Receives once, at most the length of `bytes`. Returns the number of bytes.
    pub(crate) fn receive_once(&mut self, bytes: &mut [u8]) -> usize {
        self.0.read(bytes).unwrap()
    }

    /// Sends GET `endpoint`.
    pub(crate) fn get(&mut self, endpoint: &str) -> Answer {
        self.ask("GET", endpoint, None, &[])
    }

    /// Sends PUT `endpoint` without a body.
    pub(crate) fn put(&mut self, endpoint: &str) -> Answer {
        self.ask("PUT", endpoint, None, &[])
    }

    /// Sends PUT `endpoint` with a body.
    pub(crate) fn put_json(&mut self, endpoint: &str, body: &Value) -> Answer {
        self.ask("PUT", endpoint, Some(body), &[])
    }

    /// Sends a request with file descriptors attached.
    pub(crate) fn ask(&mut self, method: &str, endpoint: &str, body: Option<&Value>, fds: &[OwnedFd]) -> Answer {
        let body = body.map(Value::to_string).unwrap_or_default();
        let length = body.len();
        let request = format!(
            "{method} /api/v1/{endpoint} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        self.send(request.as_bytes(), fds);
        self.answer()
    }

    /// Sends a request to a program that may drop the connection. Returns the status of its reply, if there is one.
    pub(crate) fn try_ask(&mut self, method: &str, endpoint: &str, body: Option<&Value>) -> Option<u16> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let length = body.len();
        let head = format!("{method} /api/v1/{endpoint} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}");
        self.0.write_all(format!("{head}\r\nConnection: close\r\n\r\n{body}").as_bytes()).ok()?;
        let mut answer = String::new();
        // Data received before the connection broke counts, too.
        let _ = self.0.read_to_string(&mut answer);
        answer.strip_prefix("HTTP/1.1 ")?.split(' ').next()?.parse().ok()
    }

    /// Sends bytes, with file descriptors attached to the first.
    pub(crate) fn send(&mut self, request: &[u8], fds: &[OwnedFd]) {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let sent = sendmsg(&self.0, &[IoSlice::new(request)], &mut control, SendFlags::empty()).unwrap();
        self.0.write_all(&request[sent..]).unwrap();
    }

    /// Receives the next reply.
    pub(crate) fn answer(&mut self) -> Answer {
        let (head, body) = self.answer_as_sent();
        let status = head.strip_prefix("HTTP/1.1 ").unwrap().split(' ').next().unwrap().parse().unwrap();
        let body = if body.is_empty() { Value::Null } else { serde_json::from_str(&body).unwrap() };
        Answer { status, body }
    }

    /// Receives the next reply: its head without the empty line, and its body.
    pub(crate) fn answer_as_sent(&mut self) -> (String, String) {
        let mut bytes = Vec::new();
        let head = loop {
            if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
                break end;
            }
            self.read_on(&mut bytes);
        };
        let text = String::from_utf8(bytes[..head].to_vec()).unwrap();
        let length = text.lines().find_map(|line| line.strip_prefix("Content-Length: "));
        let length: usize = length.map_or(0, |length| length.parse().unwrap());
        while bytes.len() < head + 4 + length {
            self.read_on(&mut bytes);
        }
        assert_eq!(bytes.len(), head + 4 + length, "nothing follows an answer");
        (text, String::from_utf8(bytes.split_off(head + 4)).unwrap())
    }

    fn read_on(&mut self, bytes: &mut Vec<u8>) {
        let mut chunk = [0; 16 << 10];
        let count = self.0.read(&mut chunk).unwrap();
        assert!(count > 0, "the connection was closed after {:?}", String::from_utf8_lossy(bytes));
        bytes.extend_from_slice(&chunk[..count]);
    }
}

impl Answer {
    /// The body of a reply that must have this status.
    pub(crate) fn expect(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.body);
        self.body
    }
}
