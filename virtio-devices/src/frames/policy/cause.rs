//! The reasons for dropping a frame.

/// The reason why a frame is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The source is a group, or not an address of the sending function.
    SpoofedAddress,
    /// The sender may not use the tags, or they are cut off.
    BadVlan,
    /// The destination is a group that bridges reserve (`IEEE 802.1Q §8.6.3`): 01-80-C2-00-00-00 to -0F.
    ReservedGroup,
    /// The frame is not in a VLAN of the receiving function.
    OtherVlan,
}
