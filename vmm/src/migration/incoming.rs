//! Frames of a connection.

use std::io::{self, Read};

use super::loader::{LoadError, Loader};
use super::wire::{Frame, GREETING, Greeting, HEADER, Header, Kind, MAX_BODY, Pages, WireError};

/// Size of the buffer for pages on their way to guest memory, in bytes.
const BUFFER: usize = 256 << 10;

/// Reason why reading ends.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The connection fails, or a deadline has passed.
    #[error("the connection to the peer: {0}")]
    Lost(#[from] io::Error),
    /// The bytes are not this protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The guest has no memory for the pages.
    #[error(transparent)]
    Load(#[from] LoadError),
}

/// A frame; of a frame of pages, only the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// A frame.
    Frame(Frame),
    /// Table of pages, whose bytes [`Incoming::load`] reads next.
    Pages(Pages),
}

/// Reader of a connection's frames, with a buffer of fixed size.
#[derive(Debug)]
pub struct Incoming<R> {
    reader: R,
    buffer: Box<[u8]>,
}

impl<R: Read> Incoming<R> {
    /// Reads frames from `reader`.
    pub fn new(reader: R) -> Self {
        Self { reader, buffer: vec![0; BUFFER.max(MAX_BODY)].into() }
    }

    /// Returns the underlying reader.
    pub const fn reader(&self) -> &R {
        &self.reader
    }

    /// Reads the greeting, which starts a connection.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost, or the peer is not this program.
    pub fn greeting(&mut self) -> Result<Greeting, ReadError> {
        let mut bytes = [0; GREETING];
        self.reader.read_exact(&mut bytes)?;
        Ok(Greeting::read(&bytes)?)
    }

    /// Reads the next frame.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost, or the bytes are not this protocol.
    pub fn receive(&mut self) -> Result<Item, ReadError> {
        let mut header = [0; HEADER];
        self.reader.read_exact(&mut header)?;
        let Header { kind, len } = Header::read(header)?;
        if kind == Kind::Pages {
            return self.table(len).map(Item::Pages);
        }
        let body = self.buffer.get_mut(..len as usize).ok_or(WireError::Short)?;
        self.reader.read_exact(body)?;
        Ok(Item::Frame(Frame::read(kind, body)?))
    }

    fn table(&mut self, len: u32) -> Result<Pages, ReadError> {
        let mut count = [0; 8];
        if (len as usize) < count.len() {
            return Err(WireError::Short.into());
        }
        self.reader.read_exact(&mut count)?;
        let table = Pages::table_len(count)?;
        if count.len() + table > len as usize {
            return Err(WireError::Short.into());
        }
        let table = self.buffer.get_mut(..table).ok_or(WireError::Short)?;
        self.reader.read_exact(table)?;
        Ok(Pages::read(table, len)?)
    }

    /// Reads the bytes of `pages` into guest memory.
    ///
    /// # Errors
    ///
    /// Fails if the connection is lost, or the guest has no such memory.
    pub fn load(&mut self, pages: &Pages, loader: &Loader) -> Result<(), ReadError> {
        for range in pages.ranges() {
            if range.is_zero {
                loader.clear(range.start, range.len.into())?;
                continue;
            }
            let (mut start, mut left) = (range.start, range.len as usize);
            while left > 0 {
                let part = left.min(self.buffer.len());
                let bytes = self.buffer.get_mut(..part).ok_or(WireError::Short)?;
                self.reader.read_exact(bytes)?;
                loader.write(start, bytes)?;
                start += part as u64;
                left -= part;
            }
        }
        Ok(())
    }
}
