//! A client of a VMM's REST API.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Time that the VMM may take to create its socket.
const SOCKET_LIMIT: Duration = Duration::from_secs(30);
/// Time that the VMM may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Time that a guest may take to release a device.
const EJECT_LIMIT: Duration = Duration::from_secs(60);

/// A client for one VMM's API socket.
#[derive(Clone, Debug)]
pub struct Api {
    socket: PathBuf,
}

/// Answer of the VMM.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The body; null if there is none.
    pub body: Value,
}

impl Api {
    /// The API of a VMM that is started with [`Api::argument`]. The socket's path is unique to this test process and
    /// `name`.
    pub fn new(name: &str) -> Api {
        let socket = std::env::temp_dir().join(format!("api-{}-{name}", std::process::id()));
        Api { socket }
    }

    /// The API of a VMM whose socket has this path.
    pub fn at(socket: PathBuf) -> Api {
        Api { socket }
    }

    /// The API of a VMM with this value of `--api-socket`.
    pub(crate) fn of(argument: &str) -> Api {
        Api { socket: argument.trim_start_matches("path=").into() }
    }

    /// The value of `--api-socket`.
    pub fn argument(&self) -> String {
        format!("path={}", self.socket.display())
    }

    /// Sends GET `endpoint`.
    pub fn get(&self, endpoint: &str) -> Answer {
        self.request("GET", endpoint, None)
    }

    /// Sends PUT `endpoint` without a body.
    pub fn put(&self, endpoint: &str) -> Answer {
        self.request("PUT", endpoint, None)
    }

    /// Sends PUT `endpoint` with a body.
    pub fn put_json(&self, endpoint: &str, body: &Value) -> Answer {
        self.request("PUT", endpoint, Some(body))
    }

    /// Sends PUT `endpoint` with a body, and descriptors with the first byte of the request.
    pub fn put_with_fds(&self, endpoint: &str, body: &Value, fds: &[OwnedFd]) -> Answer {
        self.request_with_fds("PUT", endpoint, Some(body), fds)
    }

    /// The body of `vm.info`.
    pub fn info(&self) -> Value {
        let Answer { status, body } = self.get("vm.info");
        assert_eq!(status, 200, "{body}");
        body
    }

    /// True if the VM has a device with this `id`.
    pub fn has_device(&self, id: &str) -> bool {
        self.info()["device_tree"].get(id).is_some()
    }

    /// Removes the device `id`, and waits until the guest has released it.
    pub fn remove_device(&self, id: &str) {
        let answer = self.put_json("vm.remove-device", &json!({ "id": id }));
        assert_eq!((answer.status, answer.body), (204, Value::Null));
        self.await_removal(id);
    }

    /// Waits until the guest has released the device `id`, after a request.
    pub fn await_removal(&self, id: &str) {
        let deadline = Instant::now() + EJECT_LIMIT;
        while self.has_device(id) {
            assert!(Instant::now() < deadline, "the guest never released {id}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn request(&self, method: &str, endpoint: &str, body: Option<&Value>) -> Answer {
        self.request_with_fds(method, endpoint, body, &[])
    }

    fn request_with_fds(&self, method: &str, endpoint: &str, body: Option<&Value>, fds: &[OwnedFd]) -> Answer {
        let mut stream = self.connect();
        stream.set_read_timeout(Some(ANSWER_LIMIT)).unwrap();
        let answer = exchange(&mut stream, method, endpoint, body, fds);
        answer.unwrap_or_else(|error| panic!("{method} {endpoint}: {error}"))
    }

    /// Sends a request without a body. Fails if the VMM does not answer within `limit`.
    pub(crate) fn ask(&self, method: &str, endpoint: &str, limit: Duration) -> io::Result<Answer> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(limit))?;
        exchange(&mut stream, method, endpoint, None, &[])
    }

    fn connect(&self) -> UnixStream {
        let deadline = Instant::now() + SOCKET_LIMIT;
        loop {
            match UnixStream::connect(&self.socket) {
                Ok(stream) => return stream,
                Err(error) => assert!(Instant::now() < deadline, "{}: {error}", self.socket.display()),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Sends a request, and descriptors with its first byte, and reads the answer.
fn exchange(
    stream: &mut UnixStream,
    method: &str,
    endpoint: &str,
    body: Option<&Value>,
    fds: &[OwnedFd],
) -> io::Result<Answer> {
    let body = body.map(Value::to_string).unwrap_or_default();
    let length = if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
    let head = format!("{method} /api/v1/{endpoint} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{length}\r\n");
    let numbers: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let sent = stream.send_with_fds(&[head.as_bytes()], &numbers).map_err(io::Error::from)?;
    stream.write_all(&[&head.as_bytes()[sent..], body.as_bytes()].concat())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let wrong = || io::Error::other(format!("{answer:?}"));
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(wrong)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(wrong)?;
    let body = if body.is_empty() { Value::Null } else { serde_json::from_str(body)? };
    Ok(Answer { status, body })
}
