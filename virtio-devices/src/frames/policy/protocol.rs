//! The two kinds of VLAN tags (`IEEE 802.1Q §9.5`).

/// The owner of a tag.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum VlanProtocol {
    /// A customer's, type 0x8100 (802.1Q).
    #[default]
    Customer,
    /// A provider's, type 0x88a8 (802.1ad).
    Service,
}

impl VlanProtocol {
    /// The protocol with this Ethernet type.
    pub(super) const fn of(kind: [u8; 2]) -> Option<Self> {
        match kind {
            [0x81, 0x00] => Some(Self::Customer),
            [0x88, 0xa8] => Some(Self::Service),
            _ => None,
        }
    }

    pub(super) const fn kind(self) -> [u8; 2] {
        match self {
            Self::Customer => [0x81, 0x00],
            Self::Service => [0x88, 0xa8],
        }
    }
}
