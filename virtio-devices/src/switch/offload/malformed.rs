//! Why nothing can be done for a frame.

/// Why a frame is dropped that its receiver cannot have as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// Its checksum lies outside of it, or is not where its packet has one.
    Checksum,
    /// It is to be cut into segments of a kind that is not offered, or that it is not of.
    Kind,
    /// It is no packet of this kind: a header is cut off or contradicts itself, or it is a fragment.
    Headers,
    /// It would be cut into more segments than there may be.
    TooMany,
}
