//! Saved state of a paused machine, without memory and configuration: versioned plain data, not trusted on restore.
//!
//! Each module restores its part through the checks that apply to guest writes. No number in the state sizes an
//! allocation that the configuration does not bound as well.
//!
//! | file | what it is |
//! |---|---|
//! | `vcpu_state` | state of a vCPU |
//! | `clock` | KVM's clock and the time stamp counter |
//! | `irqchip` | KVM's interrupt controllers |
//! | `compatibility` | check of a host's CPU features against the guest's |
//! | `guest_options` | options that a guest sees in CPUID and in firmware tables |
//! | `backend_state` | state of backends besides their queues |
//! | `blob` | kernel structures as text |
//! | `output` | unread console output |
//! | `version` | versions of saved states |
//! | `error` | errors of saving and restoring |

pub(crate) mod backend_state;
pub mod blob;
pub mod clock;
pub mod compatibility;
pub mod error;
pub(crate) mod guest_options;
pub mod irqchip;
pub mod output;
pub mod vcpu_state;
pub mod version;

use serde::{Deserialize, Serialize};
use virtio_devices::DeviceState;
use vm_api::config::net::guest_control::GuestSettings;

use crate::acpi::event_state::EventDeviceState;
use crate::firmware::{FirmwareState, LegacyState};
use crate::machine_state::clock::ClockState;
use crate::machine_state::compatibility::CpuidLeaf;
use crate::machine_state::irqchip::IrqchipState;
use crate::machine_state::output::ConsolesState;
use crate::machine_state::vcpu_state::VcpuState;
use crate::serial::SerialState;

/// State of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    /// [`MACHINE_STATE_VERSION`](crate::machine_state::version::MACHINE_STATE_VERSION) of the program that saved it.
    pub version: u16,
    /// Addresses of the guest.
    pub layout: LayoutState,
    /// CPUID of the vCPUs, without values that differ between them.
    pub cpuid: Vec<CpuidLeaf>,
    /// The guest's time.
    pub clock: ClockState,
    /// The interrupt controllers that vCPUs share.
    pub irqchip: IrqchipState,
    /// The vCPUs that exist, by ascending numbers.
    pub vcpus: Vec<VcpuState>,
    /// Number of vCPUs that the guest should have, now and after a restart.
    pub wanted_vcpus: u8,
    /// Size of memory outside zones in the configuration, in bytes: what the guest has now, or after its next restart.
    pub wanted_memory: u64,
    /// Generic event device, with the hot-plug registers.
    pub events: EventDeviceState,
    /// Serial port, if any.
    pub serial: Option<SerialState>,
    /// Unread console output.
    #[serde(default, skip_serializing_if = "ConsolesState::is_empty")]
    pub consoles: ConsolesState,
    /// I/O ports of firmware, if the payload is firmware.
    pub firmware: Option<FirmwareState>,
    /// Legacy PC hardware, if a payload other than firmware needs it. States of older programs have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub legacy: Option<LegacyState>,
    /// Devices, by segment and slot.
    pub devices: Vec<SavedDevice>,
    /// Numbers of the root buses of segment 0 other than bus 0, if the guest has any and no device is on one: it got
    /// them with NICs that have been removed. With such devices, the configuration says which there are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub empty_root_buses: Vec<u8>,
    /// The guest's pending power-off or reset.
    pub stop: Option<StopState>,
    /// Number of the guest's triple faults.
    pub triple_faults: u64,
    /// Options visible to the guest in CPUID and firmware tables, with their values. States of older programs have
    /// none, and are not compared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub told: Vec<(String, String)>,
    /// Settings that the guest has made for its VFs. States of older programs have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guest_vfs: Vec<GuestVfState>,
}

/// Settings that the guest has made for a VF.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestVfState {
    /// Id of the PF.
    pub id: String,
    /// Index of the VF.
    pub vf: u16,
    /// The settings.
    pub settings: GuestSettings,
}

/// Guest-physical layout of a machine, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayoutState {
    /// Width of physical addresses, in bits.
    pub address_bits: u8,
    /// Memory at boot.
    pub memory_at_boot: u64,
    /// Memory regions by ascending address: first address and length. virtio-mem regions are listed whole, regardless
    /// of what is plugged.
    pub regions: Vec<(u64, u64)>,
    /// Range of memory added before boot and counted as boot memory: first address and end.
    pub plugged: (u64, u64),
    /// 64-bit MMIO range of BARs: first address and end.
    pub mmio64: (u64, u64),
}

/// A device and its slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedDevice {
    /// Id in the configuration.
    pub id: String,
    /// PCI segment.
    pub segment: u16,
    /// Root bus: 0, or another one on segment 0. Older states have none other than 0.
    #[serde(default, skip_serializing_if = "is_0")]
    pub bus: u8,
    /// Device number on the root bus.
    pub slot: u8,
    /// First bus of its VFs, if any.
    pub first_vf_bus: Option<u8>,
    /// True while a request to eject the device is pending.
    pub leaving: bool,
    /// Registers, if a driver can change any.
    pub state: Option<DeviceState>,
}

fn is_0(bus: &u8) -> bool {
    *bus == 0
}

/// Pending stop of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopState {
    /// Power-off.
    PowerOff,
    /// Reset.
    Reset,
    /// Triple fault of a vCPU.
    TripleFault,
}
