//! The target's side of a TLS handshake, without blocking.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::{Connection, ServerConfig, ServerConnection};

use super::{NO_TLS, Session, failed};

/// A handshake over a non-blocking socket, and the first bytes after it.
#[derive(Debug)]
pub(crate) struct Accepting(pub(super) Connection);

impl Accepting {
    /// Starts a handshake.
    ///
    /// # Errors
    ///
    /// Fails if the library cannot be set up.
    pub(crate) fn new(config: &Arc<ServerConfig>) -> io::Result<Self> {
        Ok(Self(ServerConnection::new(Arc::clone(config)).map_err(failed)?.into()))
    }

    /// Reads from `stream` once, and sends handshake replies. Returns the number of bytes decrypted into `bytes`, 0
    /// during the handshake.
    ///
    /// # Errors
    ///
    /// Fails if the peer is not trusted, does not speak TLS or has disconnected; with [`io::ErrorKind::WouldBlock`] if
    /// nothing has arrived.
    pub(crate) fn advance(&mut self, stream: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
        self.send(stream)?;
        match self.0.read_tls(&mut &*stream) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, NO_TLS)),
            Ok(_) => {}
            Err(error) => return Err(error),
        }
        if let Err(error) = self.0.process_new_packets() {
            // Sends the alert, if the peer still reads.
            let _ = self.0.write_tls(&mut &*stream);
            return Err(failed(error));
        }
        self.send(stream)?;
        match self.0.reader().read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            read => read,
        }
    }

    /// Sends as much as fits into the socket.
    fn send(&mut self, stream: &TcpStream) -> io::Result<()> {
        while self.0.wants_write() {
            match self.0.write_tls(&mut &*stream) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// True if a reply waits for room in the socket.
    pub(crate) fn awaits_room(&self) -> bool {
        self.0.wants_write()
    }

    /// Sends `bytes` after a completed handshake, as far as they fit into the socket.
    pub(crate) fn send_last(&mut self, stream: &TcpStream, bytes: &[u8]) {
        if !self.0.is_handshaking() && self.0.writer().write_all(bytes).is_ok() {
            // The connection is closed next in any case.
            let _ = self.send(stream);
        }
    }

    /// Returns the session of a completed handshake. The stream blocks from now on.
    pub(crate) fn into_session(self, stream: TcpStream) -> Session {
        Session::new(stream, self.0)
    }
}
