//! The HTTP subset that this client needs, over the API's socket: one request at a time, with descriptors.

use std::io::{self, IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sendmsg, socket_with,
};

/// The maximum length of the status line and headers of a reply, in bytes.
const MOST_HEAD: usize = 64 << 10;
/// The maximum length of a reply's body, in bytes, far above that of `/metrics` of a VM with the most VFs.
const MOST_BODY: usize = 256 << 20;
/// Time until a VMM that has not answered is checked.
const CHECK: Duration = Duration::from_secs(20);
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
    /// The VMM does not answer.
    #[error(
        "the VMM did not answer within {} s; see if its process is stopped or busy, or wait longer (--timeout 0: \
         without limit)",
        .0.as_secs()
    )]
    TimedOut(Duration),
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
pub(crate) struct Client {
    stream: UnixStream,
    /// Path of the socket.
    path: PathBuf,
    patience: Patience,
}

/// Limit of the wait for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// This long.
    Limited(Duration),
    /// While the VMM accepts other requests, which is checked after each such time.
    WhileAlive(Duration),
    /// None.
    Endless,
}

impl Patience {
    /// By the number of seconds that a user gives, if any.
    pub(crate) fn new(seconds: Option<u32>) -> Self {
        match seconds {
            None => Self::WhileAlive(CHECK),
            Some(0) => Self::Endless,
            Some(seconds) => Self::Limited(Duration::from_secs(seconds.into())),
        }
    }

    /// Time after which a system call returns.
    const fn limit(self) -> Option<Duration> {
        match self {
            Self::Limited(limit) | Self::WhileAlive(limit) => Some(limit),
            Self::Endless => None,
        }
    }
}

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

    /// Name of its endpoint.
    pub(crate) fn endpoint(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
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
    /// Fails if no program listens there, or it accepts no connection in time.
    pub(crate) fn connect(path: &Path, patience: Patience) -> Result<Self, ClientError> {
        let stream =
            connected(path, patience.limit()).map_err(|error| match (is_timeout(&error), patience.limit()) {
                (true, Some(limit)) => ClientError::TimedOut(limit),
                _ => ClientError::Connect { path: path.to_owned(), error },
            })?;
        Ok(Self { stream, path: path.to_owned(), patience })
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
        let rest = request.as_bytes().get(sent..).unwrap_or_default();
        self.stream.write_all(rest).map_err(|error| self.failed(error))?;
        self.receive()
    }

    /// The error of a system call on the connection.
    fn failed(&self, error: io::Error) -> ClientError {
        match self.patience.limit() {
            Some(limit) if is_timeout(&error) => ClientError::TimedOut(limit),
            _ => error.into(),
        }
    }

    /// Reads from the connection, as long as the wait may last.
    fn read(&mut self, bytes: &mut [u8], until: Option<Instant>) -> Result<usize, ClientError> {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
            self.stream.set_read_timeout(left.or(self.patience.limit()))?;
            let limit = match (self.stream.read(bytes), self.patience) {
                (Ok(count), _) => return Ok(count),
                (Err(error), _) if error.kind() == io::ErrorKind::Interrupted => continue,
                (Err(error), Patience::WhileAlive(limit) | Patience::Limited(limit)) if is_timeout(&error) => limit,
                (Err(error), _) => return Err(error.into()),
            };
            let may_wait = matches!(self.patience, Patience::WhileAlive(_)) && is_alive(&self.path, limit);
            if !may_wait {
                return Err(ClientError::TimedOut(limit));
            }
        }
    }

    /// Sends as many of `bytes` as the socket accepts, with all descriptors.
    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, ClientError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(ClientError::Fds(fds.len()));
        }
        let sent = sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
        sent.map_err(|error| self.failed(error.into()))
    }

    fn receive(&mut self) -> Result<Answer, ClientError> {
        let until = match self.patience {
            Patience::Limited(limit) => Instant::now().checked_add(limit),
            Patience::WhileAlive(_) | Patience::Endless => None,
        };
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
            match self.read(&mut bytes, until)? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                count => received.extend_from_slice(bytes.get(..count).unwrap_or_default()),
            }
        };
        let mut body = received.split_off(head.len);
        while body.len() < head.body {
            let mut bytes = [0; 4096];
            match self.read(&mut bytes, until)? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                count => body.extend_from_slice(bytes.get(..count).unwrap_or_default()),
            }
        }
        body.truncate(head.body);
        let body = String::from_utf8(body).map_err(|_| ClientError::Answer("it is not UTF-8".to_string()))?;
        Ok(Answer { status: head.status, body })
    }
}

/// True if a system call has waited as long as it may.
fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Connects to the socket at `path`. With `limit`, a system call waits no longer than that.
fn connected(path: &Path, limit: Option<Duration>) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let stream = UnixStream::from(socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?);
    stream.set_write_timeout(limit)?;
    stream.set_read_timeout(limit)?;
    rustix::net::connect(&stream, &address)?;
    Ok(stream)
}

/// True if the VMM answers a request for a path that it does not have. It does so in any state of its VM.
fn is_alive(path: &Path, limit: Duration) -> bool {
    let answered = |mut stream: UnixStream| {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
        stream.read(&mut [0; 64])
    };
    connected(path, Some(limit)).and_then(answered).is_ok_and(|count| count > 0)
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
        let mut client = Client { stream: client, path: PathBuf::new(), patience: Patience::Endless };
        let answer = client.call(&call, &[]);
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

    /// A program that accepts connections and answers none.
    #[test]
    fn a_vmm_that_does_not_answer_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _silent = std::os::unix::net::UnixListener::bind(&path).unwrap();
        for patience in [Patience::Limited, Patience::WhileAlive] {
            let mut client = Client::connect(&path, patience(Duration::from_millis(50))).unwrap();
            let answer = client.call(&Call::new("GET", "vmm.ping"), &[]);
            assert!(matches!(answer, Err(ClientError::TimedOut(_))), "{answer:?}");
        }
        assert_eq!(Patience::new(Some(0)).limit(), None);
        assert_eq!(Patience::new(Some(3)), Patience::Limited(Duration::from_secs(3)));
    }

    /// The first request is answered once another one has shown that the VMM is alive.
    #[test]
    fn a_vmm_that_answers_others_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let serving = thread::spawn(move || {
            let (mut slow, _) = listener.accept().unwrap();
            let (mut check, _) = listener.accept().unwrap();
            // A connection that is closed before its request is read looks like the end of the VMM.
            assert_ne!(check.read(&mut [0; 4096]).unwrap(), 0);
            check.write_all(b"HTTP/1.1 404 \r\n\r\n").unwrap();
            slow.write_all(b"HTTP/1.1 204 \r\n\r\n").unwrap();
            (slow, check)
        });
        let mut client = Client::connect(&path, Patience::WhileAlive(Duration::from_secs(5))).unwrap();
        assert_eq!(client.call(&Call::new("PUT", "vm.snapshot"), &[]).unwrap().status, 204);
        drop(serving.join().unwrap());
    }

    #[test]
    fn a_malformed_answer_is_an_error() {
        assert!(matches!(ask("HTTP/1.1 200 \r\nContent-Length: 9\r\n\r\nshort", 9).0, Err(ClientError::Lost(_))));
        assert!(matches!(ask("", 1).0, Err(ClientError::Lost(_))));
        for wrong in ["SSH-2.0\r\n\r\n", "HTTP/1.1 200 \r\nContent-Length: -1\r\n\r\n"] {
            assert!(matches!(ask(wrong, 1000).0, Err(ClientError::Answer(_))), "{wrong}");
        }
    }
}
