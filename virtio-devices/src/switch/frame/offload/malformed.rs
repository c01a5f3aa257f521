//! The reasons why a frame cannot be converted for its receiver.

/// The reason why a frame that its receiver cannot have unchanged is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// The checksum field is outside the frame, or not at the place for its protocol.
    Checksum,
    /// The segmentation type is not offered, or does not match the packet.
    Kind,
    /// The packet is not of this type: a header is cut off or contradicts itself, or it is a fragment.
    Headers,
    /// The frame would need more segments than are allowed.
    TooMany,
}
