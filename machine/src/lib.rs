//! The machine that devices are plugged into: KVM, what one architecture has, and the ACPI tables. It knows neither
//! threads nor the configuration's plan.
//!
//! The modules of this crate, from the top down. Each may use the modules below it, never those above, which
//! `tests/layering.rs` checks:
//!
//! | module | subject | independent of |
//! |---|---|---|
//! | `acpi` | tables, the generic event device, vCPU hot-plug registers | threads, KVM |
//! | `exits` | the handlers of exits: ports, and addresses that are not memory | vCPUs; devices at addresses |
//! | `pci_layout` | the addresses of BARs, divided among PCI segments | BARs; the configuration |
//! | `kvm` | KVM's system calls; no other module calls KVM | guests and devices |
//! | `arch` | addresses, CPUID, registers, boot protocols | the rest of the crate |
//! | `error_kind` | [`ErrorKind`](error_kind::ErrorKind): exit code and HTTP status | the errors |
//! | `passed_fd` | descriptors passed to this process, by number | their use |

pub mod acpi;
pub mod arch;
pub mod error_kind;
pub mod exits;
pub mod kvm;
pub mod passed_fd;
pub mod pci_layout;
