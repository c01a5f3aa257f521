//! TLS 1.3 over the connections of a migration, with mutual authentication by certificates of one authority.
//!
//! Reads and writes happen in different threads. So a session does not use the library's stream type: a thread that
//! waits for the network holds no lock that the other direction needs.

mod accepting;
mod files;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, Error};

use super::deadline::Deadline;
pub(crate) use accepting::Accepting;
pub(crate) use files::{client, server};

/// Time limit of a handshake.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes read from the network at a time.
const ROOM: usize = 64 << 10;
/// Bytes encrypted at a time.
const PART: usize = 64 << 10;

/// An encrypted connection.
#[derive(Debug)]
pub(crate) struct Session {
    stream: TcpStream,
    connection: Mutex<Connection>,
    /// Received bytes that are not decrypted yet. Has a single reader.
    incoming: Mutex<Incoming>,
    /// Records are sent in the order of encryption. Locked before `connection`.
    outgoing: Mutex<Outgoing>,
}

#[derive(Debug)]
struct Incoming {
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
}

#[derive(Debug, Default)]
struct Outgoing {
    records: Vec<u8>,
    /// True after an error: a partial record may have been sent, so nothing can follow.
    is_broken: bool,
}

impl Session {
    /// Runs the client's handshake over `stream`, until the deadline. The target's certificate must be for `host`.
    ///
    /// # Errors
    ///
    /// Fails with one line: the side that does not trust the other, and the cause; or a timeout.
    pub(crate) fn connect(
        stream: TcpStream,
        host: &str,
        config: &Arc<ClientConfig>,
        until: &Deadline,
    ) -> io::Result<Self> {
        let name = ServerName::try_from(host.to_string());
        let name = name.map_err(|_| io::Error::other("TLS: no certificate can have this name; give another"))?;
        let mut connection = ClientConnection::new(Arc::clone(config), name).map_err(failed)?.into();
        shake_hands(&stream, &mut connection, until)?;
        Ok(Self::new(stream, connection))
    }

    /// Creates a session from a completed handshake.
    fn new(stream: TcpStream, connection: Connection) -> Self {
        let incoming = Incoming { bytes: vec![0; ROOM].into(), from: 0, to: 0 };
        let (connection, incoming) = (Mutex::new(connection), Mutex::new(incoming));
        Self { stream, connection, incoming, outgoing: Mutex::default() }
    }

    /// The underlying connection.
    pub(crate) const fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Reads decrypted bytes, received from `stream`: [`Self::stream`], or a wrapper of it with a deadline.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are not the peer's, or none arrive. The latter can be retried.
    pub(crate) fn read_through(&self, mut stream: impl Read, bytes: &mut [u8]) -> io::Result<usize> {
        let mut incoming = self.incoming.lock();
        loop {
            match self.connection.lock().reader().read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
            if incoming.from == incoming.to {
                let count = stream.read(&mut incoming.bytes)?;
                // The protocol above announces the end of a connection, or counts it as lost.
                if count == 0 {
                    return Ok(0);
                }
                (incoming.from, incoming.to) = (0, count);
            }
            self.decrypt(&mut incoming)?;
        }
    }

    /// Sends all pending records.
    fn send(&self, outgoing: &mut Outgoing) -> io::Result<()> {
        if outgoing.is_broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let Outgoing { records, is_broken } = outgoing;
        records.clear();
        {
            let mut connection = self.connection.lock();
            while connection.wants_write() {
                connection.write_tls(records)?;
            }
        }
        // After an error the peer cannot decrypt the partial record.
        (&self.stream).write_all(records).inspect_err(|_| *is_broken = true)
    }

    /// Decrypts received bytes. Sends replies of the library.
    fn decrypt(&self, incoming: &mut Incoming) -> io::Result<()> {
        let (done, answers) = {
            let mut connection = self.connection.lock();
            let mut rest = incoming.bytes.get(incoming.from..incoming.to).unwrap_or_default();
            incoming.from += connection.read_tls(&mut rest)?;
            (connection.process_new_packets(), connection.wants_write())
        };
        if answers {
            let sent = self.send(&mut self.outgoing.lock());
            // The cause of an error matters more than a failure to send the alert.
            done.as_ref().map_or(Ok(()), |_| sent)?;
        }
        done.map(|_| ()).map_err(failed)
    }
}

impl Read for &Session {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.read_through(&self.stream, bytes)
    }
}

impl Write for &Session {
    /// Writes bytes. After an error nothing of them has arrived, and no write succeeds.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut outgoing = self.outgoing.lock();
        if outgoing.is_broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let count = self.connection.lock().writer().write(bytes.get(..PART).unwrap_or(bytes))?;
        self.send(&mut outgoing)?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs the mutual TLS handshake; fails at the deadline.
fn shake_hands(stream: &TcpStream, connection: &mut Connection, until: &Deadline) -> io::Result<()> {
    let late = || io::Error::new(io::ErrorKind::TimedOut, "TLS: the peer did not answer in time");
    while connection.is_handshaking() || connection.wants_write() {
        if connection.wants_write() {
            connection.write_tls(&mut &*stream)?;
            continue;
        }
        match connection.read_tls(&mut until.reads(stream)) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, NO_TLS)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(late()),
            Err(error) => return Err(error),
        }
        if let Err(error) = connection.process_new_packets() {
            // Sends the alert, if the peer still reads.
            let _ = connection.write_tls(&mut &*stream);
            return Err(failed(error));
        }
    }
    Ok(())
}

const NO_TLS: &str = "TLS: the peer closed the connection; if it was given no tls_dir, give it one";

/// Converts an error of the library to one line.
fn failed(error: Error) -> io::Error {
    let line = match error {
        Error::InvalidMessage(_) => "TLS: the peer does not speak it; give both sides a tls_dir".to_string(),
        error => format!("TLS: {}", error.to_string().replace('\n', " ")),
    };
    io::Error::new(io::ErrorKind::InvalidData, line)
}
