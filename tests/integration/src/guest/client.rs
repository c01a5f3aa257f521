//! A client at the host's end of a guest's console: a pseudo-terminal or a socket.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::vmm::api::Api;

/// Time that the VMM may take to listen, and the guest to print the expected text.
const LIMIT: Duration = Duration::from_secs(60);

/// The host's end of a console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A pseudo-terminal that the VMM creates.
    Pty,
    /// A socket that the VMM listens on.
    Socket,
}

impl Place {
    /// The value of `--serial` or `--console`; `option` is the option's name without dashes.
    pub fn argument(self, option: &str) -> String {
        match self {
            Place::Pty => "pty".into(),
            Place::Socket => format!("socket={}", Place::path(option).display()),
        }
    }

    /// Connects to the console `option`. A pseudo-terminal's path is taken from `vm.info`.
    pub fn connect(self, option: &str, api: &Api) -> Client {
        match self {
            Place::Pty => {
                let info = api.info();
                let path = info["config"][option]["file"].as_str().unwrap_or_else(|| panic!("a path in {info}"));
                Client::terminal(Path::new(path))
            }
            Place::Socket => Client::socket(&Place::path(option)),
        }
    }

    fn path(option: &str) -> PathBuf {
        std::env::temp_dir().join(format!("{option}-{}", std::process::id()))
    }
}

/// A connection to a console: reads what the guest prints, and types.
pub struct Client {
    file: File,
    seen: Vec<u8>,
}

impl Client {
    fn terminal(path: &Path) -> Client {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(path);
        Client { file: file.unwrap_or_else(|error| panic!("{}: {error}", path.display())), seen: Vec::new() }
    }

    fn socket(path: &Path) -> Client {
        let deadline = Instant::now() + LIMIT;
        loop {
            match UnixStream::connect(path) {
                Ok(stream) => return Client { file: OwnedFd::from(stream).into(), seen: Vec::new() },
                Err(error) => assert!(Instant::now() < deadline, "{}: {error}", path.display()),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Another handle to the connection, for typing.
    pub(crate) fn writer(&self) -> File {
        self.file.as_fd().try_clone_to_owned().expect("a descriptor can be duplicated").into()
    }

    /// Types `text`.
    pub fn send(&mut self, text: &str) {
        self.file.write_all(text.as_bytes()).unwrap();
    }

    /// Waits until the guest has printed `text`, and drops what was read up to its end.
    pub fn wait_for(&mut self, text: &str) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let found = self.seen.windows(text.len()).position(|window| window == text.as_bytes());
            if let Some(at) = found {
                self.seen.drain(..at + text.len());
                return;
            }
            assert!(
                Instant::now() < deadline,
                "the guest never printed {text:?}; it printed {:?}",
                String::from_utf8_lossy(&self.seen)
            );
            let mut poll = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: the array has one pollfd, as given.
            if unsafe { libc::poll(&mut poll, 1, 100) } > 0 {
                let mut buffer = [0; 4096];
                let length = self.file.read(&mut buffer).unwrap();
                self.seen.extend_from_slice(&buffer[..length]);
            }
        }
    }
}

impl Read for Client {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.file.read(buffer)
    }
}
