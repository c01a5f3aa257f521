//! The forwarding modes of a switch.

/// The forwarding mode of a switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwitchMode {
    /// Local forwarding: a virtual Ethernet bridge (`IEEE 802.1Q §5.22`).
    Veb,
    /// Forwarding through the switch behind the uplink: a virtual Ethernet port aggregator (`IEEE 802.1Q §5.23`).
    Vepa,
}
