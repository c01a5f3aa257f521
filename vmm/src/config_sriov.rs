//! From a configuration to a plan: everything that was left out is decided, and everything that can be wrong is found, before
//! anything is opened.

use std::net::IpAddr;
use std::os::fd::RawFd;

/// One device of bus 0: a NIC, or a PF and its VFs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetPlan {
    /// The device's name in the VM: what the user gave, or `_net<N>`.
    pub id: String,
    /// The device number on bus 0, 1 to 31; `None` for the lowest that is free.
    pub pci_device_id: Option<u8>,
    /// The NIC, or the physical function.
    pub pf: NicPlan,
    /// The virtual functions by index; as many as are reserved, none for a plain NIC.
    pub vfs: Vec<NicPlan>,
}

/// One network function: a plain NIC, a PF or a VF.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicPlan {
    /// The function's name, from which its threads take theirs: `_net0` or `pf0v3`. Unique in the VM.
    pub id: String,
    /// The MAC address in the guest. Unique in the VM.
    pub mac: [u8; 6],
    /// The MTU that the guest is told, 1280 to 65535 bytes.
    pub mtu: Option<u16>,
    /// Pairs of a receive and a transmit queue, 1 or more. The same for all VFs of a PF.
    pub queue_pairs: u16,
    /// The largest size of each queue: a power of two up to 32768.
    pub queue_size: u16,
    /// Whether TCP segmentation is offered in both directions. Implies `offload_csum`.
    pub offload_tso: bool,
    /// Whether UDP segmentation is wanted. Implies `offload_csum`.
    pub offload_ufo: bool,
    /// Whether checksums may be left to the other side.
    pub offload_csum: bool,
    /// Where the packets go.
    pub backend: BackendPlan,
}

/// Where a function's packets go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendPlan {
    /// A tap interface of the host. No other function of the VM has it.
    Tap {
        /// Its name, 1 to 15 bytes; `None` for any that is free, of the form `vmtap<N>`.
        name: Option<String>,
        /// The host's address on it; given together with `mask` and of the same family.
        ip: Option<IpAddr>,
        /// The network mask of `ip`.
        mask: Option<IpAddr>,
        /// The interface's own MAC address.
        host_mac: Option<[u8; 6]>,
    },
    /// Taps that were opened before the program started, one for each pair of queues. Each number is above 2, and no other
    /// function of the VM has it.
    Fds(Vec<RawFd>),
}
