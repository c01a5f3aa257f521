//! Why a frame is dropped.

/// Why a frame is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Its source is a group, or not an address of the function that sends it.
    SpoofedAddress,
    /// Its tags are not what its sender may use, or are cut off.
    BadVlan,
    /// It is for a group that bridges keep for themselves (`IEEE 802.1Q §8.6.3`): 01-80-C2-00-00-00 to -0F.
    ReservedGroup,
    /// It is not in a VLAN of the function that would receive it.
    OtherVlan,
}
