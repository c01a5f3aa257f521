//! Connections of a live migration: over tcp, encrypted or not, or a Unix socket, with deadlines.

mod route;
mod until;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustls::ServerConfig;
use virtio_devices::Cancel;

use super::tls::Session;
pub(crate) use route::Route;
use until::LOOK;
pub(crate) use until::Until;

/// How long a connection may take, and a write on one of whose peer takes nothing.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

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
    /// Has whoever has connected by tcp prove who it is.
    ///
    /// # Errors
    ///
    /// It is not to be trusted, or does not answer in time.
    pub(crate) fn accept(self, tls: &Arc<ServerConfig>, until: &Until) -> io::Result<Self> {
        match self {
            Self::Tcp(stream) => Ok(Self::Tls(Box::new(Session::accept(stream, tls, until)?))),
            other => Ok(other),
        }
    }

    /// What comes by it until then.
    pub(crate) const fn reads_until(&self, until: Until) -> Reads<'_> {
        Reads { stream: self, until }
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

/// What comes by a connection until a moment, however it comes.
pub(crate) struct Reads<'a> {
    stream: &'a Stream,
    until: Until,
}

impl Read for Reads<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self.stream {
            Stream::Unix(stream) => self.until.reads(stream).read(bytes),
            Stream::Tcp(stream) => self.until.reads(stream).read(bytes),
            Stream::Tls(session) => session.read_through(self.until.reads(session.stream()), bytes),
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
        while !cancel.is_cancelled() {
            let mut fds = [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)];
            match rustix::event::poll(&mut fds, Some(&LOOK)) {
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
            let connect = || Route::find(address.clone(), None).unwrap().connect(&cancel);
            let stream = connect().unwrap();
            let accepted = listener.accept(&cancel).unwrap().unwrap();
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
