//! The target's side of a TLS handshake, advanced by a thread that waits for many peers at once.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::{Connection, ServerConfig, ServerConnection};

use super::{NO_TLS, Session, failed};

/// A handshake over a socket that does not block, and the first bytes after it.
#[derive(Debug)]
pub(crate) struct Accepting(pub(super) Connection);

impl Accepting {
    /// The state before the first byte.
    ///
    /// # Errors
    ///
    /// The library lacks something.
    pub(crate) fn new(config: &Arc<ServerConfig>) -> io::Result<Self> {
        Ok(Self(ServerConnection::new(Arc::clone(config)).map_err(failed)?.into()))
    }

    /// Reads from `stream` once, and sends what the handshake has to answer. Returns the number of bytes of the peer
    /// that were decrypted into `bytes`, which is 0 during the handshake.
    ///
    /// # Errors
    ///
    /// The peer is not trusted, does not speak TLS or is gone; or nothing has come ([`io::ErrorKind::WouldBlock`]).
    pub(crate) fn advance(&mut self, stream: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
        self.send(stream)?;
        match self.0.read_tls(&mut &*stream) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, NO_TLS)),
            Ok(_) => {}
            Err(error) => return Err(error),
        }
        if let Err(error) = self.0.process_new_packets() {
            // The peer learns the reason, if it still listens.
            let _ = self.0.write_tls(&mut &*stream);
            return Err(failed(error));
        }
        self.send(stream)?;
        match self.0.reader().read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            read => read,
        }
    }

    /// Sends what fits into the socket.
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

    /// True if an answer waits for room in the socket.
    pub(crate) fn awaits_room(&self) -> bool {
        self.0.wants_write()
    }

    /// Sends `bytes` to a peer whose handshake is complete, as far as there is room.
    pub(crate) fn say(&mut self, stream: &TcpStream, bytes: &[u8]) {
        if !self.0.is_handshaking() && self.0.writer().write_all(bytes).is_ok() {
            // The connection is closed next, so an error changes nothing.
            let _ = self.send(stream);
        }
    }

    /// The session, whose stream blocks from now on. Its handshake is complete.
    pub(crate) fn into_session(self, stream: TcpStream) -> Session {
        Session::new(stream, self.0)
    }
}
