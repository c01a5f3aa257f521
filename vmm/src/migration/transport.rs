//! Connections of a live migration: over tcp, encrypted or not, or a Unix socket, with deadlines.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustls::{ClientConfig, ServerConfig};
use virtio_devices::Cancel;

use super::tls::Session;

/// How long a connection may take, and a write on one of whose peer takes nothing.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// How often a wait looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(50);

/// Where a target listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// A host and a port.
    Tcp(String, u16),
    /// The path of a socket.
    Unix(PathBuf),
}

impl Address {
    /// Reads `url`, the value of `key`.
    ///
    /// # Errors
    ///
    /// One line that says how it is written.
    pub(crate) fn parse(key: &str, url: &str) -> Result<Self, String> {
        let wrong = || format!("{key}={url}: write it as tcp:<host>:<port> or unix:<path>");
        if let Some(path) = url.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        let (host, port) = url.strip_prefix("tcp:").and_then(|rest| rest.rsplit_once(':')).ok_or_else(wrong)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let port = port.parse::<u16>().map_err(|_| wrong())?;
        let is_plain = bare == host && host.contains(':');
        if bare.is_empty() || is_plain || bare.contains(['/', '[', ']']) {
            Err(wrong())
        } else {
            Ok(Self::Tcp(bare.into(), port))
        }
    }

    /// Whether it is a Unix socket.
    pub(crate) const fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }
}

/// A connection. Reading and writing are for one thread each.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Tls(Box<Session>),
    Unix(UnixStream),
}

impl Stream {
    /// Connects. With `tls`, which is for tcp only, both sides prove who they are.
    ///
    /// # Errors
    ///
    /// Nobody listens there, or not in time, or is not to be trusted.
    pub(crate) fn connect(address: &Address, tls: Option<&Arc<ClientConfig>>) -> io::Result<Self> {
        let stream = match address {
            Address::Unix(path) => Self::Unix(UnixStream::connect(path)?),
            Address::Tcp(host, port) => {
                let deadline = Instant::now() + PATIENCE;
                let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
                let connected = (host.as_str(), *port).to_socket_addrs()?.find_map(|address| {
                    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
                    TcpStream::connect_timeout(&address, left).map_err(|error| last = error).ok()
                });
                Self::Tcp(connected.ok_or(last)?)
            }
        };
        stream.prepare()?;
        match (stream, tls, address) {
            (Self::Tcp(stream), Some(config), Address::Tcp(host, _)) => {
                Ok(Self::Tls(Box::new(Session::connect(stream, host, config)?)))
            }
            (stream, ..) => Ok(stream),
        }
    }

    /// Has whoever has connected by tcp prove who it is.
    ///
    /// # Errors
    ///
    /// It is not to be trusted, or does not answer in time.
    pub(crate) fn accept(self, tls: &Arc<ServerConfig>) -> io::Result<Self> {
        match self {
            Self::Tcp(stream) => Ok(Self::Tls(Box::new(Session::accept(stream, tls)?))),
            other => Ok(other),
        }
    }

    /// The connection over a Unix socket.
    pub(crate) const fn unix(&self) -> Option<&UnixStream> {
        match self {
            Self::Unix(stream) => Some(stream),
            Self::Tcp(_) | Self::Tls(_) => None,
        }
    }

    /// The connection over tcp, encrypted or not.
    const fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Self::Tcp(stream) => Some(stream),
            Self::Tls(session) => Some(session.stream()),
            Self::Unix(_) => None,
        }
    }

    /// Messages go out at once, and a peer that takes nothing is lost after a while.
    fn prepare(&self) -> io::Result<()> {
        if let Self::Unix(stream) = self {
            return stream.set_write_timeout(Some(PATIENCE));
        }
        let Some(stream) = self.tcp() else { return Ok(()) };
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        rustix::net::sockopt::set_tcp_user_timeout(stream, PATIENCE.as_millis() as u32)?;
        Ok(())
    }

    /// Has reads end after this time, or never.
    pub(crate) fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        if let Self::Unix(stream) = self {
            return stream.set_read_timeout(time);
        }
        self.tcp().map_or(Ok(()), |stream| stream.set_read_timeout(time))
    }

    /// Ends it for both sides, and whoever waits on it. What was written before still arrives.
    pub(crate) fn close(&self) {
        // If it is closed already, that is as well.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Self::Tls(session) => session.stream().shutdown(Shutdown::Both),
        };
    }
}

impl Read for &Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&*stream).read(bytes),
            Stream::Tcp(stream) => (&*stream).read(bytes),
            Stream::Tls(session) => (&**session).read(bytes),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&*stream).write(bytes),
            Stream::Tcp(stream) => (&*stream).write(bytes),
            Stream::Tls(session) => (&**session).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a target listens with. Dropping it removes the socket's path.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Listens at `address`.
    ///
    /// # Errors
    ///
    /// It is taken, or not this host's.
    pub(crate) fn bind(address: &Address) -> io::Result<Self> {
        let listener = match address {
            Address::Unix(path) => Self::Unix(UnixListener::bind(path)?, path.clone()),
            Address::Tcp(host, port) => Self::Tcp(TcpListener::bind((host.as_str(), *port))?),
        };
        match &listener {
            Self::Unix(listener, _) => listener.set_nonblocking(true)?,
            Self::Tcp(listener) => listener.set_nonblocking(true)?,
        }
        Ok(listener)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener, _) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }

    /// The next connection; `None` once `cancel` says that none is wanted any more.
    ///
    /// # Errors
    ///
    /// The host has no descriptor left.
    pub(crate) fn accept(&self, cancel: &Cancel) -> io::Result<Option<Stream>> {
        let look = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as i64 };
        while !cancel.is_cancelled() {
            let mut fds = [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)];
            match rustix::event::poll(&mut fds, Some(&look)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            let accepted = match self {
                Self::Unix(listener, _) => listener.accept().and_then(|(stream, _)| {
                    stream.set_nonblocking(false)?;
                    Ok(Stream::Unix(stream))
                }),
                Self::Tcp(listener) => listener.accept().and_then(|(stream, _)| {
                    stream.set_nonblocking(false)?;
                    Ok(Stream::Tcp(stream))
                }),
            };
            match accepted.and_then(|stream| stream.prepare().map(|()| stream)) {
                Ok(stream) => return Ok(Some(stream)),
                // It is gone already.
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            remove(path);
        }
    }
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        log::warn!("{}: {error}; remove it before the next migration", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_what_is_none_is_refused() {
        let read = |url| Address::parse("destination_url", url);
        assert_eq!(read("unix:/run/m.sock"), Ok(Address::Unix("/run/m.sock".into())));
        assert_eq!(read("tcp:host.example:4711"), Ok(Address::Tcp("host.example".into(), 4711)));
        assert_eq!(read("tcp:[::1]:1"), Ok(Address::Tcp("::1".into(), 1)));
        for wrong in ["", "unix:", "tcp:", "tcp:h", "tcp::1", "tcp:h:65536", "tcp:::1:1", "tcp:h:", "udp:h:1", "/run/m"]
        {
            let line = read(wrong).unwrap_err();
            assert_eq!(line, format!("destination_url={wrong}: write it as tcp:<host>:<port> or unix:<path>"));
        }
    }

    #[test]
    fn both_kinds_carry_bytes_and_leave_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m");
        let cancel = Cancel::new().unwrap();
        for address in [Address::Unix(path.clone()), Address::Tcp("127.0.0.1".into(), 0)] {
            let listener = Listener::bind(&address).unwrap();
            let address = match &listener {
                Listener::Tcp(listener) => Address::Tcp("localhost".into(), listener.local_addr().unwrap().port()),
                Listener::Unix(..) => address,
            };
            let stream = Stream::connect(&address, None).unwrap();
            let accepted = listener.accept(&cancel).unwrap().unwrap();
            (&stream).write_all(b"here").unwrap();
            let mut bytes = [0; 4];
            (&accepted).read_exact(&mut bytes).unwrap();
            assert_eq!(&bytes, b"here");
            stream.close();
            assert_eq!((&accepted).read(&mut bytes).unwrap(), 0);
            drop(listener);
            assert!(Stream::connect(&address, None).is_err() && !path.exists());
        }
    }

    #[test]
    fn a_wait_for_a_connection_ends_when_it_is_not_wanted() {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1".into(), 0)).unwrap();
        let cancel = Cancel::new().unwrap();
        let ends = cancel.clone();
        let waits = std::thread::spawn(move || listener.accept(&ends).unwrap().is_none());
        std::thread::sleep(Duration::from_millis(20));
        cancel.cancel();
        assert!(waits.join().unwrap());
    }
}
