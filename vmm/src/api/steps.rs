//! A client's connection without threads, for fuzz targets.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::api::Handler;
use crate::api::connection::{Connection, PATIENCE};
use crate::api::service::Service;

/// Sends `pieces`, which are short, one after the other on a new connection, and then closes the sending side. Returns
/// the bytes of all answers.
///
/// # Errors
///
/// Fails if the host has no sockets left.
pub fn converse<'p>(pieces: impl IntoIterator<Item = &'p [u8]>, handler: Arc<dyn Handler>) -> io::Result<Vec<u8>> {
    let (near, mut far) = UnixStream::pair()?;
    far.set_nonblocking(true)?;
    let service = Service { handler, is_read_only: false, budget: Arc::default(), patience: PATIENCE };
    let mut connection = Some(Connection::new(near, &Arc::new(service))?);
    let mut answers = Vec::new();
    let mut advance = |far: &mut UnixStream| {
        if let Some(open) = &mut connection
            && open.advance().is_none()
        {
            connection = None;
        }
        // An error means that no more bytes are there.
        let _ = far.read_to_end(&mut answers);
    };
    for piece in pieces {
        // Bytes after a request that closed the connection are not read.
        let _ = far.write_all(piece);
        advance(&mut far);
    }
    let _ = far.shutdown(Shutdown::Write);
    advance(&mut far);
    Ok(answers)
}
