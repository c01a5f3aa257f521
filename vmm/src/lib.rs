//! The VMM: configuration, lifecycle, KVM, ACPI and the REST API. Devices come from `virtio-devices`.
//!
//! The modules of this crate are its rooms. From the top down; each may use those below it, never those above, which
//! `tests/layering.rs` checks:
//!
//! | room | what it is | must not know |
//! |---|---|---|
//! | `control` | the one thread that changes the VM: actions, guest, signals | how devices or vCPUs work |
//! | `error` | [`Error`]: why the program ends, or an action fails | who reports it |
//! | `migration` | a guest that goes on in another process while it runs | HTTP |
//! | `snapshot` | a guest in files, and a VM that is made of it | HTTP |
//! | `vm` | a booted VM: memory, payload, power-on, reset, hot-plug | clients, HTTP, JSON |
//! | `devices` | from a plan to open devices in their slots | clients; vCPUs |
//! | `machine_state` | the state of a paused machine, as plain data | the VM; its memory |
//! | `firmware` | ports of older PCs, which firmware needs | the VM |
//! | `pci_host` | bus 0: slots, ECAM, MMIO, interrupts, BARs | the configuration |
//! | `vcpu` | vCPU threads and their exits | PCI; what is behind an address |
//! | `api` | HTTP server, requests, actions, documents | the VM; who applies an action |
//! | `telemetry` | events and their output | who reports them |
//! | `serial` | the 16550A; the host side of both consoles; the terminal | the VM |
//! | `tpm` | a TPM 2.0, backed by swtpm | the VM |
//! | `landlock` | which files this process may use | who asks for it |
//! | `acpi` | tables, the generic event device, vCPU hot-plug registers | threads, KVM |
//! | `config` | the configuration and the plan made of it | everything that runs |
//! | `vfio` | devices of the host: their registers, interrupts and memory | the bus; the configuration |
//! | `seccomp` | which system calls each kind of thread may make | what they are used for |
//! | `privileges` | the rights that this process keeps | what they are used for |
//! | `lazy_memory` | the guest's memory in a file, as a whole or page after page | the VM; snapshots |
//! | `dirty` | which pages of memory are written while the guest runs | who copies them |
//! | `threads` | the one thread that starts all others | what they do |
//! | `exits` | the handlers of exits: ports, and addresses that are not memory | vCPUs; what is behind an address |
//! | `pci_layout` | the addresses of BARs, divided among PCI segments | BARs; the configuration |
//! | `kvm` | KVM's system calls; no other room calls KVM | guests and devices |
//! | `arch` | addresses, CPUID, registers, boot protocols | the rest of the crate |
//! | `error_kind` | [`ErrorKind`]: exit code and HTTP status | the errors |
//! | `heap` | what the allocator gives back to the host | who allocates |
//! | `passed_fd` | descriptors that this process was given, by their numbers | what they are for |

pub mod acpi;
pub mod api;
pub mod arch;
pub mod config;
mod control;
mod devices;
pub mod dirty;
mod error;
mod error_kind;
mod exits;
mod firmware;
mod heap;
pub mod kvm;
mod landlock;
mod lazy_memory;
pub mod machine_state;
pub mod migration;
mod passed_fd;
mod pci_host;
mod pci_layout;
mod privileges;
mod seccomp;
pub mod serial;
mod snapshot;
mod telemetry;
mod threads;
mod tpm;
pub mod vcpu;
mod vfio;
pub mod vm;

pub use crate::landlock::LandlockError;
pub use control::{Options, run};
pub use error::Error;
pub use error_kind::ErrorKind;
pub use migration::error::MigrationError;
pub use seccomp::{Allowance, Seccomp, allowances, call_name};
pub use snapshot::error::SnapshotError;
pub use telemetry::monitor::{EventMonitor, MonitorError};
pub use virtio_devices::create_file;
pub use vm::VmError;

/// Parts of the rooms, for fuzz targets.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use pci::{ConfigTarget, Topology};

    use crate::pci_host::{assign_bars, config_pages};

    pub use crate::api::steps::converse;
    pub use crate::pci_host::assign_bars::NoRoom;
    pub use crate::pci_host::config_pages::Shown;
    pub use crate::pci_host::mmio::MmioMap;
    pub use crate::pci_host::recording_vm::{Record, RecordingVm, Refuse};
    pub use crate::pci_host::slot::{PciHost, Slot};
    pub use crate::pci_host::wiring::Wiring;
    pub use crate::pci_layout::Apertures;
    pub use crate::serial::steps::SerialSteps;
    pub use crate::snapshot::image_steps::{ImageSteps, StateSteps};

    /// The size of a page of configuration space, in bytes.
    pub const PAGE: u64 = config_pages::PAGE;

    /// Places the BARs and VF BARs of all devices of `topology` in `free`, as firmware would.
    ///
    /// # Errors
    ///
    /// Fails if there is no room.
    pub fn place_bars<D: ConfigTarget>(topology: &Topology<D>, free: Apertures) -> Result<(), NoRoom> {
        assign_bars::place_bars(topology, free)
    }
}
