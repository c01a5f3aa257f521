//! A client that sends bytes and reads answers, and a server with a handler chosen by the test.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tempfile::TempDir;
use vmm::api::{Action, Clients, Failure, Handler, PATIENCE, Reply, Server};

type Apply = Box<dyn Fn(Action) -> Result<Reply, Failure> + Send + Sync>;

struct Fake {
    asked: Arc<Mutex<Vec<String>>>,
    apply: Apply,
}

impl Handler for Fake {
    fn handle(&self, action: Action) -> Result<Reply, Failure> {
        self.asked.lock().push(format!("{action:?}"));
        (self.apply)(action)
    }
}

/// A server, and a record of the requests to its handler.
pub(crate) struct Fixture {
    pub server: Server,
    pub path: PathBuf,
    asked: Arc<Mutex<Vec<String>>>,
    _directory: TempDir,
}

/// The default handler, for tests that do not care about its answers.
pub(crate) fn plain(action: Action) -> Result<Reply, Failure> {
    Ok(match action {
        Action::Ping | Action::Info | Action::Counters => Reply::Json("{}".to_string()),
        Action::Metrics => Reply::Metrics("sriov_vfs{pf=\"pf0\"} 8\n".to_string()),
        Action::ShutdownVmm => Reply::Ok,
        _ => Reply::Done,
    })
}

/// Starts a server with the handler `apply`.
pub(crate) fn serve(apply: impl Fn(Action) -> Result<Reply, Failure> + Send + Sync + 'static) -> Fixture {
    serve_with(PATIENCE, apply)
}

/// As [`serve`], with shorter timeouts.
pub(crate) fn serve_with(
    patience: Duration,
    apply: impl Fn(Action) -> Result<Reply, Failure> + Send + Sync + 'static,
) -> Fixture {
    serve_clients(Clients::All, patience, apply)
}

/// As [`serve_with`], for these clients.
pub(crate) fn serve_clients(
    clients: Clients,
    patience: Duration,
    apply: impl Fn(Action) -> Result<Reply, Failure> + Send + Sync + 'static,
) -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("api.sock");
    let asked = Arc::new(Mutex::new(Vec::new()));
    let handler = Arc::new(Fake { asked: asked.clone(), apply: Box::new(apply) });
    let server = Server::with_patience(UnixListener::bind(&path).unwrap(), clients, handler, patience).unwrap();
    Fixture { server, path, asked, _directory: directory }
}

impl Fixture {
    /// Opens a connection.
    pub(crate) fn client(&self) -> Client {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
        Client(stream)
    }

    /// Sends one request on a new connection.
    pub(crate) fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        self.client().ask(method, path, body)
    }

    /// The actions passed to the handler so far.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().clone()
    }
}

/// A connection.
pub(crate) struct Client(pub UnixStream);

/// An answer as received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub status: u16,
    /// Everything before the empty line.
    pub head: String,
    pub body: String,
}

impl Answer {
    /// The value of a header. Its name is case-sensitive here.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// The strings of an error.
    pub(crate) fn chain(&self) -> Vec<String> {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A request with a body of known length.
pub(crate) fn request(method: &str, path: &str, body: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

impl Client {
    pub(crate) fn ask(&mut self, method: &str, path: &str, body: &str) -> Answer {
        self.send(request(method, path, body));
        self.answer()
    }

    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.write_all(bytes.as_ref()).unwrap();
    }

    /// Sends `bytes`, with descriptors attached to the first of them.
    pub(crate) fn send_with(&mut self, bytes: impl AsRef<[u8]>, fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        let bytes = bytes.as_ref();
        let sent = sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
        assert_eq!(sent, bytes.len());
    }

    /// Reads the next answer.
    pub(crate) fn answer(&mut self) -> Answer {
        self.try_answer().expect("the connection was closed before an answer")
    }

    /// Reads the next answer, or returns `None` if the connection is closed before one starts.
    pub(crate) fn try_answer(&mut self) -> Option<Answer> {
        let mut bytes = Vec::new();
        let head = loop {
            if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
                break end;
            }
            if !self.read_on(&mut bytes) {
                assert!(bytes.is_empty(), "half an answer: {}", String::from_utf8_lossy(&bytes));
                return None;
            }
        };
        let text = String::from_utf8(bytes[..head].to_vec()).unwrap();
        let length = text.lines().find_map(|line| line.strip_prefix("Content-Length: "));
        let end = head + 4 + length.map_or(0, |length| length.parse::<usize>().unwrap());
        while bytes.len() < end {
            assert!(self.read_on(&mut bytes), "half a body");
        }
        assert_eq!(bytes.len(), end, "more than one answer");
        let status = text.strip_prefix("HTTP/1.1 ").unwrap().split(' ').next().unwrap().parse().unwrap();
        Some(Answer { status, head: text, body: String::from_utf8(bytes[head + 4..].to_vec()).unwrap() })
    }

    fn read_on(&mut self, bytes: &mut Vec<u8>) -> bool {
        let mut chunk = [0; 64 << 10];
        // Closing a socket with unread data resets the connection.
        let count = self.0.read(&mut chunk).unwrap_or_else(|error| match error.kind() {
            std::io::ErrorKind::ConnectionReset => 0,
            _ => panic!("{error}"),
        });
        bytes.extend_from_slice(&chunk[..count]);
        count > 0
    }

    /// True if the server closes the connection within a moment.
    pub(crate) fn is_closed(&mut self) -> bool {
        self.0.read(&mut [0; 1]).map_or_else(|error| error.kind() == std::io::ErrorKind::ConnectionReset, |n| n == 0)
    }
}

/// A descriptor to send, and the other end of its pipe, which shows when all copies of it are closed.
pub(crate) struct Probe {
    ours: OwnedFd,
    theirs: OwnedFd,
}

impl Probe {
    pub(crate) fn new() -> Self {
        let (ours, theirs) = rustix::pipe::pipe().unwrap();
        Self { ours, theirs }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.theirs.as_fd()
    }

    /// Waits until the server, in this process, has received `count` copies.
    pub(crate) fn await_received(&self, count: usize) {
        let is_copy = |number: &std::fs::DirEntry| {
            let link = std::fs::read_link(number.path()).ok();
            link.is_some() && link == std::fs::read_link(format!("/proc/self/fd/{}", self.theirs.as_raw_fd())).ok()
        };
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter(is_copy).count();
        let start = std::time::Instant::now();
        // Both ends of a pipe have the same name, and the test has both open.
        while open() < count + 2 {
            assert!(start.elapsed().as_secs() < 30, "{} of {count} copies were received", open());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Closes the test's own copy. Returns true if all others are closed.
    pub(crate) fn closes_everywhere(self) -> bool {
        let Self { ours, theirs } = self;
        drop(theirs);
        let mut fds = [rustix::event::PollFd::new(&ours, rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 5, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&timeout)).unwrap() == 1
    }
}
