//! The HTTP subset that this client needs, over the API's socket: one request at a time, with descriptors.

use std::io::{self, IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// The maximum length of the status line and headers of a reply, in bytes.
const MOST_HEAD: usize = 64 << 10;
/// The maximum length of a reply's body, in bytes, far above that of `/metrics` of a VM with the most VFs.
const MOST_BODY: usize = 256 << 20;
/// The most descriptors in one message (`SCM_MAX_FD`).
const MOST_FDS: usize = 253;

/// Reason why a call has no reply.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// No program listens on the socket.
    #[error("--api-socket {}: {error}; is cloud-hypervisor running with this --api-socket?", path.display())]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// The connection was lost.
    #[error("the connection to the VMM was lost: {0}")]
    Lost(#[from] io::Error),
    /// The reply is not HTTP, or too long.
    #[error("the VMM's answer cannot be read: {0}")]
    Answer(String),
    /// There are too many descriptors for one message.
    #[error("{0} file descriptors; a request can carry at most {MOST_FDS}, pass fewer")]
    Fds(usize),
}

/// A connection to the API.
pub(crate) struct Client(UnixStream);

/// A call of the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    /// `GET` or `PUT`.
    pub method: &'static str,
    /// The whole path, such as `/api/v1/vm.info`.
    pub path: String,
    /// A JSON document; `None` without a body.
    pub body: Option<String>,
}

impl Call {
    /// A call without a body to an endpoint, such as `vm.info`.
    pub(crate) fn new(method: &'static str, endpoint: &str) -> Self {
        Self { method, path: format!("/api/v1/{endpoint}"), body: None }
    }
}

/// A reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The status code.
    pub status: u16,
    /// The body, empty if there is none.
    pub body: String,
}

impl Answer {
    /// True if the call succeeded.
    pub(crate) const fn is_success(&self) -> bool {
        self.status / 100 == 2
    }
}

impl Client {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    ///
    /// Fails if no program listens there.
    pub(crate) fn connect(path: &Path) -> Result<Self, ClientError> {
        UnixStream::connect(path).map(Self).map_err(|error| ClientError::Connect { path: path.to_owned(), error })
    }

    /// Sends a call with these descriptors, and waits for the reply.
    ///
    /// # Errors
    ///
    /// Fails if there is no reply. A reply that reports a failure is a success here.
    pub(crate) fn call(&mut self, call: &Call, fds: &[BorrowedFd<'_>]) -> Result<Answer, ClientError> {
        let Call { method, path, body } = call;
        let mut request = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n");
        if let Some(body) = body {
            request += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        } else {
            request += "\r\n";
        }
        let sent = self.send(request.as_bytes(), fds)?;
        self.0.write_all(request.as_bytes().get(sent..).unwrap_or_default())?;
        self.receive()
    }

    /// Sends as many of `bytes` as the socket accepts, with all descriptors.
    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, ClientError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(ClientError::Fds(fds.len()));
        }
        let sent = sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
        Ok(sent.map_err(io::Error::from)?)
    }

    fn receive(&mut self) -> Result<Answer, ClientError> {
        let mut received = Vec::new();
        let head = loop {
            if let Some(head) = Head::parse(&received)? {
                if head.status >= 200 {
                    break head;
                }
                // An interim reply: another one follows.
                received.drain(..head.len);
                continue;
            }
            if received.len() > MOST_HEAD {
                return Err(ClientError::Answer(format!("its headers have more than {MOST_HEAD} bytes")));
            }
            let mut bytes = [0; 4096];
            match self.0.read(&mut bytes)? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                count => received.extend_from_slice(bytes.get(..count).unwrap_or_default()),
            }
        };
        let mut body = received.split_off(head.len);
        let missing = head.body.saturating_sub(body.len());
        io::Read::by_ref(&mut self.0).take(missing as u64).read_to_end(&mut body)?;
        if body.len() < head.body {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        body.truncate(head.body);
        let body = String::from_utf8(body).map_err(|_| ClientError::Answer("it is not UTF-8".to_string()))?;
        Ok(Answer { status: head.status, body })
    }
}

/// A reply's status line and headers.
struct Head {
    status: u16,
    /// Their own length, in bytes.
    len: usize,
    /// The length of the body, in bytes.
    body: usize,
}

impl Head {
    /// `None` until it is complete.
    fn parse(received: &[u8]) -> Result<Option<Self>, ClientError> {
        let wrong = |what: &str| ClientError::Answer(what.to_string());
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut headers);
        let len = match response.parse(received).map_err(|error| wrong(&error.to_string()))? {
            httparse::Status::Complete(len) => len,
            httparse::Status::Partial => return Ok(None),
        };
        let find = |name: &str| response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
        if find("Transfer-Encoding").is_some() {
            return Err(wrong("it is chunked"));
        }
        let body = match find("Content-Length").map(|header| std::str::from_utf8(header.value)) {
            None => 0,
            Some(text) => text
                .ok()
                .and_then(|text| text.trim().parse().ok())
                .ok_or_else(|| wrong("its Content-Length is not a number"))?,
        };
        if body > MOST_BODY {
            return Err(wrong("its body is too long"));
        }
        Ok(Some(Self { status: response.code.unwrap_or_default(), len, body }))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Replies with `answer` in pieces of `piece` bytes, and returns the request.
    fn ask(answer: &'static str, piece: usize) -> (Result<Answer, ClientError>, String) {
        let (client, mut server) = UnixStream::pair().unwrap();
        let serving = thread::spawn(move || {
            let mut asked = vec![0; 4096];
            let count = server.read(&mut asked).unwrap();
            for piece in answer.as_bytes().chunks(piece) {
                server.write_all(piece).unwrap();
            }
            String::from_utf8_lossy(&asked[..count]).into_owned()
        });
        let call = Call { body: Some("{}".to_string()), ..Call::new("PUT", "vm.resize") };
        let answer = Client(client).call(&call, &[]);
        (answer, serving.join().unwrap())
    }

    #[test]
    fn an_answer_may_come_in_any_pieces() {
        let text = "HTTP/1.1 100 \r\n\r\nHTTP/1.1 200 \r\nServer: x\r\nContent-Length: 4\r\n\r\n{\"a\"";
        for piece in [1, 3, 1000] {
            let (answer, asked) = ask(text, piece);
            assert_eq!(answer.unwrap(), Answer { status: 200, body: "{\"a\"".to_string() });
            assert!(asked.starts_with("PUT /api/v1/vm.resize HTTP/1.1\r\n") && asked.ends_with("\r\n\r\n{}"));
        }
    }

    #[test]
    fn an_answer_without_a_body_has_none() {
        let (answer, _) = ask("HTTP/1.1 204 No Content\r\n\r\n", 1000);
        assert_eq!(answer.unwrap(), Answer { status: 204, body: String::new() });
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        assert!(matches!(ask("HTTP/1.1 200 \r\nContent-Length: 9\r\n\r\nshort", 9).0, Err(ClientError::Lost(_))));
        assert!(matches!(ask("", 1).0, Err(ClientError::Lost(_))));
        for wrong in ["SSH-2.0\r\n\r\n", "HTTP/1.1 200 \r\nContent-Length: -1\r\n\r\n"] {
            assert!(matches!(ask(wrong, 1000).0, Err(ClientError::Answer(_))), "{wrong}");
        }
    }
}
