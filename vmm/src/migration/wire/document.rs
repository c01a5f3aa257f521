//! Documents longer than a frame, in parts.

use super::bounds::{MAX_DOCUMENT, MAX_PART};
use super::error::WireError;

/// A part of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// True for the last part.
    pub is_last: bool,
    /// Bytes of the part, at most [`MAX_PART`].
    pub bytes: Vec<u8>,
}

/// A document that arrives in parts.
#[derive(Debug)]
pub struct Document {
    bytes: Vec<u8>,
    most: usize,
    is_complete: bool,
}

impl Default for Document {
    fn default() -> Self {
        Self::new(MAX_DOCUMENT)
    }
}

impl Document {
    /// Creates a document of at most `most` bytes.
    pub const fn new(most: usize) -> Self {
        Self { bytes: Vec::new(), most, is_complete: false }
    }

    /// Adds a part. Returns true if it was the last.
    ///
    /// # Errors
    ///
    /// Fails if the document becomes too long, or was complete.
    pub fn add(&mut self, part: &Part) -> Result<bool, WireError> {
        if self.is_complete || self.bytes.len() + part.bytes.len() > self.most {
            return Err(WireError::Field("document"));
        }
        self.bytes.extend_from_slice(&part.bytes);
        self.is_complete = part.is_last;
        Ok(part.is_last)
    }

    /// Bytes of the document; `None` until the last part has arrived.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.is_complete.then_some(&self.bytes)
    }

    /// Takes the bytes; no part can be added afterwards.
    pub fn take(&mut self) -> Vec<u8> {
        self.is_complete = true;
        std::mem::take(&mut self.bytes)
    }
}

/// Splits a document into parts.
pub fn parts(document: &[u8]) -> impl Iterator<Item = Part> + '_ {
    let count = document.len().div_ceil(MAX_PART).max(1);
    (1..=count).map(move |n| {
        let start = (n - 1) * MAX_PART;
        let end = document.len().min(start + MAX_PART);
        Part { is_last: n == count, bytes: document.get(start..end).unwrap_or_default().to_vec() }
    })
}
