//! Saved state: plain data with a version, which is not trusted on restore.
//!
//! A state holds the driver's setup of a device, and the work that the device still owes the driver. The device itself
//! is built from its configuration. Registers are restored through the same write masks as a driver's writes, in an
//! order that a driver could have used; a value that does not read back unchanged is refused. Whatever the bytes of a
//! state are, a driver could have reached the restored state. No number in a state sizes an allocation.
//!
//! VFs that were enabled are enabled again, without the edge of VF Enable that would reset them.

pub(crate) mod hex_bytes;

use std::io;

use pci::{ConfigState, VfIndex};
use serde::{Deserialize, Serialize};

use crate::state::hex_bytes::HexBytes;

/// The version of the states that this crate saves.
pub const STATE_VERSION: u16 = 1;

/// The reason why a state cannot be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The queues are still run by their workers.
    #[error(
        "the device's queues are running; pause it and wait until they have stopped before saving or restoring \
         its state"
    )]
    Running,
    /// The device belongs to the host, and its state cannot be read.
    #[error("it is a device of the host, whose state cannot be read; remove it first")]
    OfHost,
    /// The state has a version that this crate does not support.
    #[error("saved state of version {0}; this is version {STATE_VERSION}")]
    Version(u16),
    /// The state is from another device, or from one with another configuration.
    #[error("saved state of a device with different {0}")]
    Shape(&'static str),
    /// The driver has read another value than it would read here.
    #[error("its driver has read {what} {then}, but the device here has {now}; configure it as it was")]
    Told {
        /// The field of the device configuration, or the option.
        what: String,
        /// The value when the state was saved.
        then: String,
        /// The value here.
        now: String,
    },
    /// The driver uses features that the device does not offer.
    #[error(
        "its driver uses the virtio feature bits {}, which are not offered here; configure it as it was",
        bits(*.0)
    )]
    Features(u64),
    /// The state holds a value that no driver could have caused.
    #[error("saved state with an impossible value in {0}")]
    Value(&'static str),
    /// The registers of configuration space cannot be restored.
    #[error(transparent)]
    Config(#[from] pci::RestoreError),
    /// The registers of an X550 cannot be restored.
    #[error(transparent)]
    X550(#[from] x550::RestoreError),
    /// There is no file descriptor for an interrupt vector.
    #[error("an eventfd for interrupt vector {vector}: {error}")]
    Eventfd {
        /// The vector.
        vector: u16,
        /// The cause.
        error: io::Error,
    },
    /// A VF cannot be restored.
    #[error("VF {index}: {error}")]
    Vf {
        /// The VF.
        index: VfIndex,
        /// The cause.
        error: Box<Self>,
    },
}

/// The numbers of the bits that are set.
fn bits(mask: u64) -> String {
    let bits = (0..u64::BITS).filter(|bit| mask >> bit & 1 == 1).map(|bit| bit.to_string());
    bits.collect::<Vec<_>>().join(", ")
}

/// A device with all its functions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceState {
    /// [`STATE_VERSION`] when it was saved.
    pub version: u16,
    /// The routing ID of the device's own function.
    pub rid: u16,
    /// The device type (`virtio 1.4 §5`). Of another device, 0 or its PCI Device ID, which are no such types.
    pub device_type: u16,
    /// The device's own function, its PF.
    pub function: FunctionState,
    /// The VFs of a PF.
    pub vfs: Option<VfsState>,
}

/// The VFs of a PF.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VfsState {
    /// The number of reserved VFs.
    pub total_vfs: u16,
    /// First VF Offset.
    pub first_vf_offset: u16,
    /// VF Stride.
    pub vf_stride: u16,
    /// The VFs that are not in their power-on state, by ascending index.
    pub changed: Vec<VfState>,
}

impl VfsState {
    /// Number and addresses of the VFs of a PF, without their state.
    pub(crate) fn of(sriov: &pci::Sriov) -> Self {
        let shape = sriov.shape();
        Self {
            total_vfs: shape.total_vfs,
            first_vf_offset: shape.first_vf_offset,
            vf_stride: shape.vf_stride,
            changed: Vec::new(),
        }
    }
}

/// A VF.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VfState {
    /// The index, from 0.
    pub index: u16,
    /// The function.
    pub function: FunctionState,
}

/// A function: configuration space, transport, queues, device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionState {
    /// Configuration space, and MSI-X.
    pub config: ConfigState,
    /// The transport.
    pub transport: TransportState,
    /// The positions of its enabled queues, by ascending index; `None` if they have not run since the last reset.
    pub positions: Option<Vec<PositionState>>,
    /// The device behind the transport.
    pub device: DeviceSpecific,
    /// The properties that its driver has read. Earlier programs saved none, and nothing is compared then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told: Option<ToldState>,
}

/// The most bytes of a line of a guest's channel.
pub(crate) const MAX_LINE: usize = 4096;
/// The most bytes of a reply or notice to it.
pub(crate) const MAX_MESSAGE: usize = 16 << 10;
/// More bytes than any device configuration has.
const MAX_CONFIG: usize = 512;

/// The properties of a device that its driver has read and keeps using.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToldState {
    /// config_generation.
    pub generation: u8,
    /// The device configuration, as the driver read it.
    pub config: HexBytes<MAX_CONFIG>,
    /// Properties of the device that a driver relies on and that are in neither its configuration nor its features: the
    /// option and its value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub promises: Vec<(String, String)>,
}

/// The registers of virtio's common configuration (`virtio 1.4 §4.1.4.3`), the ISR status and the interrupt vectors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransportState {
    /// device_status, with DEVICE_NEEDS_RESET.
    pub status: u8,
    /// device_feature_select.
    pub device_feature_select: u32,
    /// driver_feature_select.
    pub driver_feature_select: u32,
    /// driver_feature, for each of the selects 0 to 3.
    pub driver_features: [u32; 4],
    /// config_msix_vector.
    pub config_vector: u16,
    /// queue_select.
    pub queue_select: u16,
    /// The registers of each queue.
    pub queues: Vec<QueueState>,
    /// The ISR status.
    pub isr: u8,
    /// The vectors that something was mapped to since the last reset, in ascending order.
    pub vectors: Vec<VectorState>,
}

impl TransportState {
    /// The state of a function that is not virtio.
    pub const fn unused() -> Self {
        Self {
            status: 0,
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: [0; 4],
            // None (`VIRTIO_MSI_NO_VECTOR`).
            config_vector: u16::MAX,
            queue_select: 0,
            queues: Vec::new(),
            isr: 0,
            vectors: Vec::new(),
        }
    }
}

/// The registers of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueueState {
    /// queue_size.
    pub size: u16,
    /// queue_msix_vector.
    pub vector: u16,
    /// queue_enable.
    pub enabled: bool,
    /// queue_desc.
    pub descriptor: u64,
    /// queue_driver.
    pub driver: u64,
    /// queue_device.
    pub device: u64,
}

/// An interrupt vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VectorState {
    /// The number of the vector.
    pub vector: u16,
    /// The eventfd has a pending signal: a pending bit (`PCIe 6.2 §7.7.2.5`), unless it was sent already. Sending it
    /// again is harmless.
    pub signalled: bool,
}

/// The position of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PositionState {
    /// The queue.
    pub queue: u16,
    /// The index in the available ring of the next chain to be taken.
    pub next_avail: u16,
    /// The index in the used ring of the next chain to be given back.
    pub next_used: u16,
}

/// The state of the device behind a transport, by kind of device.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "most functions with a state are NICs")]
pub enum DeviceSpecific {
    /// The power-on state, without changes by a driver.
    #[default]
    PowerOn,
    /// A device configuration that the driver wrote to, and nothing else.
    Config(Vec<u8>),
    /// A NIC.
    Net(NicState),
    /// An IOMMU.
    Iommu(IommuState),
    /// A disk.
    Block(BlockState),
    /// A guest's channel.
    Channel(Box<ChannelState>),
    /// An X550, with what all of its functions share.
    X550(Box<x550::NicState>),
}

impl DeviceSpecific {
    /// True if a device may have this state after a reset. A NIC checks its driver's commands in the state by itself.
    pub(crate) fn is_reset(&self) -> bool {
        match self {
            // An X550 is never behind a virtio transport.
            Self::PowerOn | Self::Net(_) | Self::X550(_) => true,
            // The access of endpoints in no domain outlives a reset.
            Self::Iommu(state) => state.domains.is_empty(),
            // The limits of a disk outlive resets, too.
            Self::Block(state) => state.writeback.is_none(),
            Self::Config(_) | Self::Channel(_) => false,
        }
    }
}

/// The commands of a NIC's driver (`virtio 1.4 §5.1.6.5`), and the values reported to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicState {
    /// The NIC's address.
    pub mac: [u8; 6],
    /// The link is up.
    pub link_up: bool,
    /// The generation of the device configuration.
    pub generation: u8,
    /// The queue pairs that the driver uses.
    pub active_pairs: u16,
    /// The offloaded frames that the driver accepts, as bits of `VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET`.
    pub offloads: u64,
    /// The receive modes by their commands: promisc, allmulti, alluni, nomulti, nouni, nobcast.
    pub modes: [bool; 6],
    /// Further unicast addresses.
    pub unicast: AddressesState,
    /// Multicast addresses.
    pub multicast: AddressesState,
    /// The VLANs that are received, in ascending order; `None` without a VLAN filter.
    pub vlans: Option<Vec<u16>>,
    /// The driver must announce its addresses, and has not confirmed the request yet.
    #[serde(default)]
    pub announce: bool,
    /// The buckets of the NIC's limits. Left out while all of them are full.
    #[serde(default, skip_serializing_if = "BucketsState::is_full")]
    pub buckets: BucketsState,
    /// The addresses on a switch that the driver has set: of several NICs that request one, the first has it. Left out
    /// if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<HeldAddress>,
}

/// An address that a NIC has on a switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldAddress {
    /// The address.
    pub address: [u8; 6],
    /// A number that is lower than that of each later holder.
    pub since: u64,
}

/// The levels of the buckets of a NIC's limits, in the order of its configuration's limits; none of them if all are
/// full.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketsState {
    /// The buckets of the receive limits.
    pub receive: Vec<BucketState>,
    /// The buckets of the transmit limits.
    pub transmit: Vec<BucketState>,
    /// The buckets of the limits of frames to groups.
    pub storm: Vec<BucketState>,
    /// The debt of its port of a switch in the uplink's rate. Left out if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<BucketState>,
}

impl BucketsState {
    /// True if all buckets are full.
    pub(crate) fn is_full(&self) -> bool {
        *self == Self::default()
    }

    /// True if the buckets of the NIC's own limits are full.
    pub(crate) fn are_full(&self) -> bool {
        let Self { receive, transmit, storm, uplink: _ } = self;
        [receive, transmit, storm].iter().all(|buckets| buckets.is_empty())
    }
}

/// A bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketState {
    /// The time until the bucket is full, in nanoseconds: longer than from empty if it is in debt.
    pub missing: u64,
    /// The rest of the one-time burst.
    pub burst: u64,
}

/// The state of a disk: its driver's settings, and the levels of its limits, which are the host's.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockState {
    /// The driver's last write to `writeback` (`virtio 1.4 §5.2.4`), if there was one.
    pub writeback: Option<bool>,
    /// The levels of its limits' buckets, of bytes first; none of them if all are full. Each disk of a group has those
    /// of the group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<BucketState>,
}

/// The state of a guest's channel: its driver's commands, and what it has not read yet.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChannelState {
    /// The control messages that the driver is owed, as bits.
    pub owed: u8,
    /// The ports that are open.
    pub open: [bool; 2],
    /// The bytes that were taken of the chain at the head of the queue of requests.
    pub taken: u32,
    /// The beginning of a line.
    pub half: HexBytes<MAX_LINE>,
    /// The rest of a line is skipped.
    pub skips: bool,
    /// The lines that the host has not taken; null for one that was too long.
    pub lines: Vec<Option<HexBytes<MAX_LINE>>>,
    /// The replies that the driver has not received.
    pub replies: OutboxState,
    /// The notices that it has not received.
    pub notices: OutboxState,
}

/// Messages of a channel.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutboxState {
    /// The messages, in order.
    pub messages: Vec<HexBytes<MAX_MESSAGE>>,
    /// The bytes of the first that the driver has.
    pub sent: u32,
}

/// A table of addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddressesState {
    /// The addresses.
    pub addresses: Vec<[u8; 6]>,
    /// The driver has set more addresses than there is room for, and gets all frames.
    pub overflow: bool,
}

/// The setup of an IOMMU's driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IommuState {
    /// Endpoints in no domain reach all of the guest's memory.
    pub bypass: bool,
    /// The domains, in ascending order.
    pub domains: Vec<DomainState>,
}

/// A domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DomainState {
    /// The domain's number.
    pub number: u32,
    /// The endpoints in the domain: segment and routing ID.
    pub endpoints: Vec<u32>,
    /// The mappings, in ascending order; `None` for the identity mapping.
    pub mappings: Option<Vec<MappingState>>,
}

/// A mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MappingState {
    /// The first I/O address.
    pub first: u64,
    /// The last.
    pub last: u64,
    /// The guest address of the first.
    pub target: u64,
    /// It may be read.
    pub read: bool,
    /// It may be written.
    pub write: bool,
}
