#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(clippy::indexing_slicing, clippy::cast_possible_truncation)]

mod access;
mod bar;
mod capability;
mod config;
mod ecam;
mod effects;
mod function;
mod host_bridge;
mod id;
mod outcome;
mod pending;
mod pf_with_vfs;
mod port;
mod refused;
pub mod spec;
mod sriov;
mod state;
#[cfg(feature = "testing")]
pub mod testing;
mod topology;
mod window;

pub use access::{Access, Dword, DwordWrite};
pub use bar::{BarError, BarKind, BarSet};
pub use capability::aer::Aer;
pub use capability::msix::{Msix, MsixError, MsixShape, MsixStructure};
pub use capability::pcie::Pcie;
pub use capability::power::Power;
pub use capability::{ChainError, Kind as CapabilityKind, VendorCapability, VendorError};
pub use config::{ConfigShape, ConfigSpace, Identity, Role, ShapeError};
pub use ecam::{ConfigPorts, ConfigTarget, ECAM_BUS_LEN, ecam_read, ecam_write};
pub use effects::{Effects, ResetKind, VfChange};
pub use function::{Device, Function};
pub use host_bridge::HostBridge;
pub use id::{BarIndex, Bdf, IdError, Rid, VfIndex};
pub use outcome::{Outcome, Reach};
pub use pending::PendingBits;
pub use pf_with_vfs::{PfError, PfWithVfs};
pub use port::{Ari, EndpointShape, Link, LinkSpeed, LinkWidth, PortType, VfRouting};
pub use refused::Refused;
pub use sriov::{Sriov, SriovError, SriovShape};
pub use state::{AerState, ConfigState, EndpointState, MsixState, RestoreError, STATE_VERSION, SriovState};
pub use topology::{Capacity, Placement, Topology, TopologyError, VfPlacement};
pub use window::{MemoryKind, Window, WindowId};
