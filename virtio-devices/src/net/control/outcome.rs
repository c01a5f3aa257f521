//! The outcome of a command, as the log has it.

use std::fmt;

use virtio_bindings::virtio_net::*;

/// Reason why a command is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// The buffers of the command are unusable.
    Buffers,
    /// The command is shorter than its fields.
    Short,
    /// There is no such command.
    Unknown,
    /// The command needs a feature that was not negotiated.
    Feature(u32),
    /// The number of queue pairs is not possible.
    Pairs {
        /// The driver's number.
        wanted: u16,
        /// The largest possible number.
        most: u16,
    },
    /// Not all of these offloads were negotiated.
    Offloads(u64),
    /// The backend refuses.
    Backend,
    /// The MAC address is a group address, or zero.
    NotUnicast,
    /// The policy fixes the MAC address.
    FixedMac,
    /// There is no such VLAN.
    Vlan(u16),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Buffers => f.write_str("it has no byte for the answer, is too long, or is outside of memory"),
            Self::Short => f.write_str("it is shorter than its fields"),
            Self::Unknown => f.write_str("there is no such command"),
            Self::Feature(bit) => write!(f, "feature {bit} was not negotiated"),
            Self::Pairs { wanted, most } => write!(f, "{wanted} queue pairs, and 1 to {most} are possible"),
            Self::Offloads(wanted) => write!(f, "not all offloads of {wanted:#x} were negotiated"),
            Self::Backend => f.write_str("the backend refuses"),
            Self::NotUnicast => f.write_str("not an address that a NIC can have"),
            Self::FixedMac => f.write_str("the host fixes the MAC address of this function (mac=, trust=)"),
            Self::Vlan(id) => write!(f, "{id} is not a VLAN ID"),
        }
    }
}

/// The line about a command with this class and number, if it has them.
pub(super) fn line(code: Option<[u8; 2]>, result: Result<(), Refused>) -> String {
    let name = code.map_or("(without a code)", name);
    match (code, result) {
        (Some([class, number]), Err(Refused::Unknown)) => {
            format!("control command {class}/{number}: refused: {}", Refused::Unknown)
        }
        (_, Err(refused)) => format!("control command {name}: refused: {refused}"),
        (_, Ok(())) => format!("control command {name}: ok"),
    }
}

/// The name of a command (`virtio 1.4 §5.1.6.5`).
fn name([class, number]: [u8; 2]) -> &'static str {
    match (u32::from(class), u32::from(number)) {
        (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_PROMISC) => "RX_PROMISC",
        (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_ALLMULTI) => "RX_ALLMULTI",
        (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_ALLUNI) => "RX_ALLUNI",
        (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_NOMULTI) => "RX_NOMULTI",
        (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_NOUNI) => "RX_NOUNI",
        (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_NOBCAST) => "RX_NOBCAST",
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET) => "MAC_TABLE_SET",
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET) => "MAC_ADDR_SET",
        (VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_ADD) => "VLAN_ADD",
        (VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_DEL) => "VLAN_DEL",
        (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET) => "MQ_VQ_PAIRS_SET",
        (VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK) => "ANNOUNCE_ACK",
        (VIRTIO_NET_CTRL_GUEST_OFFLOADS, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET) => "GUEST_OFFLOADS_SET",
        _ => "(unknown)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_the_command_and_the_reason_of_its_refusal() {
        assert_eq!(line(Some([0, 0]), Ok(())), "control command RX_PROMISC: ok");
        let forged = "control command MAC_ADDR_SET: refused: the host fixes the MAC address of this function \
                      (mac=, trust=)";
        assert_eq!(line(Some([1, 1]), Err(Refused::FixedMac)), forged);
        let pairs = Err(Refused::Pairs { wanted: 9, most: 4 });
        let expected = "control command MQ_VQ_PAIRS_SET: refused: 9 queue pairs, and 1 to 4 are possible";
        assert_eq!(line(Some([4, 0]), pairs), expected);
        let unknown = line(Some([200, 7]), Err(Refused::Unknown));
        assert_eq!(unknown, "control command 200/7: refused: there is no such command");
        let short = line(None, Err(Refused::Short));
        assert_eq!(short, "control command (without a code): refused: it is shorter than its fields");
    }
}
