//! TLS 1.3 over the connections of a live migration: both sides prove who they are by certificates of one authority.
//!
//! Reads and writes come from different threads, so that a session is not the library's stream: a thread that waits for
//! the network holds no lock that the other direction needs.

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

/// Time that a handshake may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes that are read from the network at a time.
const ROOM: usize = 64 << 10;
/// Bytes that are encrypted at a time.
const PART: usize = 64 << 10;

/// A connection on which all is encrypted.
#[derive(Debug)]
pub(crate) struct Session {
    stream: TcpStream,
    connection: Mutex<Connection>,
    /// Bytes that have arrived and are not decrypted yet. Has a single reader.
    incoming: Mutex<Incoming>,
    /// Records go out in the order in which they are made. Locked before `connection`.
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
    /// A part of a record may have left: nothing more does.
    is_broken: bool,
}

impl Session {
    /// Greets whoever listens at the other end of `stream` as `host`, the name or the address that its certificate has,
    /// and is answered `until` then.
    ///
    /// # Errors
    ///
    /// Fails with one line: the side that does not trust the other, and the cause; or no answer arrived in time.
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

    /// A session whose handshake is complete.
    fn new(stream: TcpStream, connection: Connection) -> Self {
        let incoming = Incoming { bytes: vec![0; ROOM].into(), from: 0, to: 0 };
        let (connection, incoming) = (Mutex::new(connection), Mutex::new(incoming));
        Self { stream, connection, incoming, outgoing: Mutex::default() }
    }

    /// The connection below.
    pub(crate) const fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Reads what was decrypted, of what comes by `stream`: [`Self::stream`], or a way to wait for it.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are not the peer's, or none arrive. The latter can be tried again.
    pub(crate) fn read_through(&self, mut stream: impl Read, bytes: &mut [u8]) -> io::Result<usize> {
        let mut incoming = self.incoming.lock();
        loop {
            match self.connection.lock().reader().read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
            if incoming.from == incoming.to {
                let count = stream.read(&mut incoming.bytes)?;
                // Who ends a connection says so within the protocol above, or is lost.
                if count == 0 {
                    return Ok(0);
                }
                (incoming.from, incoming.to) = (0, count);
            }
            self.decrypt(&mut incoming)?;
        }
    }

    /// Sends what the connection has to send.
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
        // An error leaves the peer with a part of a record, which is nothing.
        (&self.stream).write_all(records).inspect_err(|_| *is_broken = true)
    }

    /// Decrypts what has come. What the library answers goes out.
    fn decrypt(&self, incoming: &mut Incoming) -> io::Result<()> {
        let (done, answers) = {
            let mut connection = self.connection.lock();
            let mut rest = incoming.bytes.get(incoming.from..incoming.to).unwrap_or_default();
            incoming.from += connection.read_tls(&mut rest)?;
            (connection.process_new_packets(), connection.wants_write())
        };
        if answers {
            let sent = self.send(&mut self.outgoing.lock());
            // What is wrong says more than that the peer does not hear it.
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
    /// If this fails, what was to be written has not arrived, and nothing does any more.
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

/// Has both sides prove who they are, `until` then.
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
            // The peer is told why, if it still listens.
            let _ = connection.write_tls(&mut &*stream);
            return Err(failed(error));
        }
    }
    Ok(())
}

const NO_TLS: &str = "TLS: the peer closed the connection; if it was given no tls_dir, give it one";

/// An error of the library, in one line.
fn failed(error: Error) -> io::Error {
    let line = match error {
        Error::InvalidMessage(_) => "TLS: the peer does not speak it; give both sides a tls_dir".to_string(),
        error => format!("TLS: {}", error.to_string().replace('\n', " ")),
    };
    io::Error::new(io::ErrorKind::InvalidData, line)
}
