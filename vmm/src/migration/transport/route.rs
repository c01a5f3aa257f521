//! Address of a target, resolved once.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};
use rustls::ClientConfig;
use virtio_devices::Cancel;

use super::{Address, PATIENCE, Stream};
use crate::migration::deadline::Deadline;
use crate::migration::tls::{self, Session};

/// Resolved address of a target: all connections use the result of the first lookup.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    address: Address,
    /// IP addresses of the host name.
    found: Vec<SocketAddr>,
    tls: Option<Arc<ClientConfig>>,
}

impl Route {
    /// Resolves `address`, which may block for a name lookup. With `tls`, for TCP only, connections are mutually
    /// authenticated.
    ///
    /// # Errors
    ///
    /// Fails if the name cannot be resolved.
    pub(crate) fn find(address: Address, tls: Option<Arc<ClientConfig>>) -> io::Result<Self> {
        let found = match &address {
            Address::Unix(_) => Vec::new(),
            Address::Tcp(host, port) => (host.as_str(), *port).to_socket_addrs()?.collect(),
        };
        Ok(Self { address, found, tls })
    }

    /// Connects, unless `cancel` ends the attempt.
    ///
    /// # Errors
    ///
    /// Fails if no target accepts in time, or the target is not trusted.
    pub(crate) fn connect(&self, cancel: &Cancel) -> io::Result<Stream> {
        let until = Deadline::after(PATIENCE, cancel);
        let stream = match &self.address {
            Address::Unix(path) => Stream::Unix(unix(path, &until)?),
            Address::Tcp(..) => {
                let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
                let connected = self.found.iter().find_map(|to| tcp(to, &until).map_err(|error| last = error).ok());
                Stream::Tcp(connected.ok_or(last)?)
            }
        };
        stream.prepare()?;
        match (stream, &self.tls, &self.address) {
            (Stream::Tcp(stream), Some(config), Address::Tcp(host, _)) => {
                let until = Deadline::after(tls::PATIENCE, cancel);
                Ok(Stream::Tls(Box::new(Session::connect(stream, host, config, &until)?)))
            }
            (stream, ..) => Ok(stream),
        }
    }
}

fn tcp(to: &SocketAddr, until: &Deadline) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let stream = TcpStream::from(socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?);
    stream.set_nonblocking(true)?;
    match connect(&stream, to) {
        Ok(()) => {}
        Err(Errno::INPROGRESS) => {
            until.ready(&stream, PollFlags::OUT)?;
            sockopt::socket_error(&stream)??;
        }
        Err(error) => return Err(error.into()),
    }
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Connects to the socket at `path`, whose backlog may be full.
fn unix(path: &Path, until: &Deadline) -> io::Result<UnixStream> {
    let to = SocketAddrUnix::new(path)?;
    let stream = UnixStream::from(socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?);
    stream.set_nonblocking(true)?;
    loop {
        match connect(&stream, &to) {
            Ok(()) => break,
            // The kernel does not report when the backlog has room.
            Err(Errno::AGAIN) => until.pause()?,
            Err(error) => return Err(error.into()),
        }
    }
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    /// Cancels a connection attempt after 100 ms. Returns the time until it fails, and the error's kind.
    fn cancelled(address: Address) -> (Duration, io::ErrorKind) {
        let route = Route::find(address, None).unwrap();
        let cancel = Cancel::new().unwrap();
        let began = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(100));
                cancel.cancel();
            });
            let error = route.connect(&cancel).unwrap_err();
            (began.elapsed(), error.kind())
        })
    }

    #[test]
    fn unaccepted_connection_attempt_ends_when_cancelled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("full");
        let unix = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&unix, 0).unwrap();
        let _waits = UnixStream::connect(&path).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&tcp, 0).unwrap();
        let to = tcp.local_addr().unwrap();
        let _waits = TcpStream::connect(to).unwrap();
        for address in [Address::Unix(path), Address::Tcp("127.0.0.1".into(), to.port())] {
            let (took, kind) = cancelled(address.clone());
            assert_eq!(kind, io::ErrorKind::ConnectionAborted, "{address:?}");
            assert!(took < Duration::from_secs(8), "{address:?}: {took:?}");
        }
    }

    #[test]
    fn an_address_without_a_listener_fails_at_once() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let cancel = Cancel::new().unwrap();
        for address in [Address::Unix("/nobody/here".into()), Address::Tcp("127.0.0.1".into(), free.port())] {
            let error = Route::find(address, None).unwrap().connect(&cancel).unwrap_err();
            assert!(matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused), "{error}");
        }
    }
}
