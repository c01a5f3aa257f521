//! Connections of a migration: TCP, optionally encrypted, or Unix sockets, with deadlines.

mod route;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::tls::Session;
pub(crate) use route::Route;

/// Time limit for connecting, and for a write that makes no progress.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Address of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// Host and port.
    Tcp(String, u16),
    /// Path of a socket.
    Unix(PathBuf),
}

impl Address {
    /// Parses `url`, the value of `key`.
    ///
    /// # Errors
    ///
    /// Fails with one line that shows the right form.
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

    /// True for a Unix socket.
    pub(crate) const fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }
}

/// A connection, for one reading and one writing thread.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Tls(Box<Session>),
    Unix(UnixStream),
}

impl Stream {
    /// Sets the mode of the socket.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    pub(crate) fn set_nonblocking(&self, is_nonblocking: bool) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_nonblocking(is_nonblocking),
            Self::Tcp(stream) => stream.set_nonblocking(is_nonblocking),
            Self::Tls(session) => session.stream().set_nonblocking(is_nonblocking),
        }
    }

    /// Returns the connection if it is a Unix socket.
    pub(crate) const fn unix(&self) -> Option<&UnixStream> {
        match self {
            Self::Unix(stream) => Some(stream),
            Self::Tcp(_) | Self::Tls(_) => None,
        }
    }

    /// Returns the connection if it is TCP, encrypted or not.
    const fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Self::Tcp(stream) => Some(stream),
            Self::Tls(session) => Some(session.stream()),
            Self::Unix(_) => None,
        }
    }

    /// Disables send delays, and limits how long a peer may accept no bytes.
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

    /// Ends reading. Bytes that have arrived can still be read.
    pub(crate) fn stop_reading(&self) {
        // Already closed: nothing to do.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Read),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Read),
            Self::Tls(session) => session.stream().shutdown(Shutdown::Read),
        };
    }

    /// Closes the connection in both directions and wakes waiters. Data already written is delivered.
    pub(crate) fn close(&self) {
        // Already closed: nothing to do.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Self::Tls(session) => session.stream().shutdown(Shutdown::Both),
        };
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
            Self::Tls(session) => session.stream().as_fd(),
        }
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

/// Listener of a target. Dropping it removes the path of a Unix socket.
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
    /// Fails if the address is in use, or not of this host.
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

    /// Accepts the next connection, which does not block; `None` if there is none.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor or memory left.
    pub(crate) fn accept(&self) -> io::Result<Option<Stream>> {
        loop {
            let accepted = match self {
                Self::Unix(listener, _) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
                Self::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
            };
            let stream = match accepted {
                Ok(stream) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                // The peer has disconnected, or its network is down.
                Err(error) if is_of_connection(&error) => continue,
                Err(error) => return Err(error),
            };
            // A failure here means that the peer has disconnected.
            if stream.prepare().and_then(|()| stream.set_nonblocking(true)).is_ok() {
                return Ok(Some(stream));
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener, _) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// True if the error belongs to the accepted connection, not to the listener (`accept(2)`).
fn is_of_connection(error: &io::Error) -> bool {
    use libc::{
        ECONNABORTED, EHOSTDOWN, EHOSTUNREACH, EINTR, ENETDOWN, ENETUNREACH, ENONET, ENOPROTOOPT, EPERM, EPROTO,
    };
    matches!(
        error.raw_os_error(),
        Some(
            ECONNABORTED
                | EHOSTDOWN
                | EHOSTUNREACH
                | EINTR
                | ENETDOWN
                | ENETUNREACH
                | ENONET
                | ENOPROTOOPT
                | EPERM
                | EPROTO
        )
    )
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
    use virtio_devices::Cancel;

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
            let connect = || Route::find(address.clone(), None).unwrap().connect(&cancel);
            let stream = connect().unwrap();
            let accepted = listener.accept().unwrap().unwrap();
            accepted.set_nonblocking(false).unwrap();
            (&stream).write_all(b"here").unwrap();
            let mut bytes = [0; 4];
            (&accepted).read_exact(&mut bytes).unwrap();
            assert_eq!(&bytes, b"here");
            stream.close();
            assert_eq!((&accepted).read(&mut bytes).unwrap(), 0);
            drop(listener);
            assert!(connect().is_err() && !path.exists());
        }
    }

    #[test]
    fn a_listener_without_a_peer_does_not_block() {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1".into(), 0)).unwrap();
        assert!(listener.accept().unwrap().is_none());
    }
}
