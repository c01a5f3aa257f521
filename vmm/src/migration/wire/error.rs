//! Errors of the protocol.

use thiserror::Error;

use super::bounds::{OLDEST, VERSION};

/// Malformed or incompatible bytes of a peer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WireError {
    /// Another program or protocol.
    #[error(
        "the peer does not speak this program's migration protocol (Cloud Hypervisor's is another); run this program \
         on both hosts"
    )]
    Foreign,
    /// No common version.
    #[error(
        "the peer speaks versions {oldest} to {version} of the migration protocol, this program {OLDEST} to {VERSION}; \
         run versions of it that are closer on both hosts"
    )]
    Version {
        /// Oldest version of the peer.
        oldest: u16,
        /// Newest version of the peer.
        version: u16,
    },
    /// A field has an invalid value.
    #[error("the peer sent a frame with an impossible {0}")]
    Field(&'static str),
    /// The kind of a frame is unknown.
    #[error("the peer sent a frame of unknown kind {0}")]
    Kind(u16),
    /// A frame exceeds the limit of its kind.
    #[error("the peer sent {len} bytes as a frame of at most {most}")]
    Long {
        /// Length of the frame.
        len: u32,
        /// Limit of its kind.
        most: usize,
    },
    /// A frame is shorter than its contents.
    #[error("the peer sent a frame that ends too early")]
    Short,
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Result<u16, WireError> {
    let bytes = bytes.get(at..at + 2).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u16::from_le_bytes).ok_or(WireError::Short)
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Result<u32, WireError> {
    let bytes = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u32::from_le_bytes).ok_or(WireError::Short)
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Result<u64, WireError> {
    let bytes = bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u64::from_le_bytes).ok_or(WireError::Short)
}
