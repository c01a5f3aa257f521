//! How a switch forwards what its functions send.

/// How a switch forwards what its functions send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwitchMode {
    /// By itself: a virtual Ethernet bridge (`IEEE 802.1Q §5.22`).
    Veb,
    /// By way of the switch behind the uplink: a virtual Ethernet port aggregator (`IEEE 802.1Q §5.23`).
    Vepa,
}
