//! The state of a paused machine, except its memory and its configuration: plain data with a version, which is not
//! trusted when it comes back.
//!
//! Each part is restored through the same checks that a guest's own writes go through, by the room that it belongs to.
//! No number in it sizes anything that the configuration does not size, too.
//!
//! | file | what it is |
//! |---|---|
//! | `vcpu_state` | the state of one vCPU |
//! | `clock` | the guest's time: its clock and its time stamp counter |
//! | `irqchip` | the interrupt controllers in the kernel |
//! | `compatibility` | whether a host can offer what a guest has seen of its CPU |
//! | `told` | options that a guest knows by its CPUs and by firmware's tables |
//! | `backend_state` | states that backends have beside their queues |
//! | `blob` | bytes of the kernel's structures, as text |
//! | `output` | output of consoles that nobody has taken yet |
//! | `version` | the versions of saved states |
//! | `error` | why a machine cannot be saved or restored |

pub(crate) mod backend_state;
pub mod blob;
pub mod clock;
pub mod compatibility;
pub mod error;
pub mod irqchip;
pub mod output;
pub(crate) mod told;
pub mod vcpu_state;
pub mod version;

use serde::{Deserialize, Serialize};
use virtio_devices::DeviceState;

use crate::acpi::event_state::EventDeviceState;
use crate::firmware::{FirmwareState, LegacyState};
use crate::machine_state::clock::ClockState;
use crate::machine_state::compatibility::CpuidLeaf;
use crate::machine_state::irqchip::IrqchipState;
use crate::machine_state::output::ConsolesState;
use crate::machine_state::vcpu_state::VcpuState;
use crate::serial::SerialState;

/// A machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    /// [`MACHINE_STATE_VERSION`](crate::machine_state::version::MACHINE_STATE_VERSION) when it was saved.
    pub version: u16,
    /// Addresses of the guest.
    pub layout: LayoutState,
    /// CPUID of its vCPUs, without the parts that differ between them.
    pub cpuid: Vec<CpuidLeaf>,
    /// The guest's time.
    pub clock: ClockState,
    /// The interrupt controllers that vCPUs share.
    pub irqchip: IrqchipState,
    /// The vCPUs that exist, by ascending numbers.
    pub vcpus: Vec<VcpuState>,
    /// Number of vCPUs that the guest should have, now and after a restart.
    pub wanted_vcpus: u8,
    /// The configuration's size of memory that is in no zone, in bytes: what the guest has, or is to have after a
    /// restart.
    pub wanted_memory: u64,
    /// The generic event device with the registers of hot-plug.
    pub events: EventDeviceState,
    /// The serial port, if there is one.
    pub serial: Option<SerialState>,
    /// Output of consoles that was kept.
    #[serde(default, skip_serializing_if = "ConsolesState::is_empty")]
    pub consoles: ConsolesState,
    /// The ports that firmware needs, if the payload is firmware.
    pub firmware: Option<FirmwareState>,
    /// Hardware of older PCs, if something else runs that needs it. Earlier programs had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub legacy: Option<LegacyState>,
    /// The devices, by segment and slot.
    pub devices: Vec<SavedDevice>,
    /// Request of the guest that was not carried out yet.
    pub stop: Option<StopState>,
    /// Number of the guest's triple faults.
    pub triple_faults: u64,
    /// Options that the guest knows by its CPUs and by firmware's tables, with their values. Earlier programs saved
    /// none, and nothing is compared then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub told: Vec<(String, String)>,
}

/// The addresses of a machine, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayoutState {
    /// The width of physical addresses, in bits.
    pub address_bits: u8,
    /// The memory that was there when the guest started.
    pub memory_at_boot: u64,
    /// The regions of memory by ascending addresses: first address and length. Regions of memory devices are among
    /// them as a whole, whatever is plugged.
    pub regions: Vec<(u64, u64)>,
    /// Memory that was added before the guest started, and is a part of what it was started with: first address and
    /// end.
    pub plugged: (u64, u64),
    /// The 64-bit addresses of BARs: first address and end.
    pub mmio64: (u64, u64),
}

/// A device in its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedDevice {
    /// Id in the configuration.
    pub id: String,
    /// PCI segment.
    pub segment: u16,
    /// Device number on bus 0 of the segment.
    pub slot: u8,
    /// The first bus of its VFs, if it has any.
    pub first_vf_bus: Option<u8>,
    /// The guest was asked to release it, and has not yet.
    pub leaving: bool,
    /// Registers, if a driver can change any.
    pub state: Option<DeviceState>,
}

/// Reason why a guest stopped by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopState {
    /// It powered off.
    PowerOff,
    /// It asked for a reset.
    Reset,
    /// Triple fault of a vCPU.
    TripleFault,
}
