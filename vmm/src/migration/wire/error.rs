//! Faults of bytes that are not this protocol, and of numbers in them.

use thiserror::Error;

use super::bounds::{OLDEST, VERSION};

/// Fault of bytes that are not this protocol.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WireError {
    /// Another program, or another protocol.
    #[error(
        "the peer does not speak this program's migration protocol (Cloud Hypervisor's is another); run this program \
         on both hosts"
    )]
    Foreign,
    /// No version that both speak.
    #[error(
        "the peer speaks versions {oldest} to {version} of the migration protocol, this program {OLDEST} to {VERSION}; \
         run versions of it that are closer on both hosts"
    )]
    Version {
        /// The peer's oldest.
        oldest: u16,
        /// The peer's newest.
        version: u16,
    },
    /// A field has a value that it cannot have.
    #[error("the peer sent a frame with an impossible {0}")]
    Field(&'static str),
    /// A frame of a kind that there is not.
    #[error("the peer sent a frame of unknown kind {0}")]
    Kind(u16),
    /// A frame is longer than its kind allows.
    #[error("the peer sent {len} bytes as a frame of at most {most}")]
    Long {
        /// Length of the frame.
        len: u32,
        /// The most.
        most: usize,
    },
    /// A frame is shorter than what it says that it has.
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
