//! PCI Express and SR-IOV, executable.
//!
//! This crate is the standard and nothing else: configuration space, BARs, capabilities, the SR-IOV extended capability,
//! the topology of functions and the configuration access mechanisms. It knows no operating system, no hypervisor, no
//! threads and no logging; what a write means for the world outside is returned as a value ([`Effects`]).
//!
//! No function that a guest can reach returns a `Result` or panics: a guest cannot cause an error, only an effect.
#![forbid(unsafe_code)]
#![warn(clippy::indexing_slicing, clippy::cast_possible_truncation)]

mod access;
mod bar;
mod capability;
mod config;
mod ecam;
mod function;
mod host_bridge;
mod id;
mod msix;
mod pcie;
mod power;
pub mod spec;
mod sriov;
mod state;
#[cfg(feature = "testing")]
pub mod testing;
mod topology;

pub use access::{Access, Dword, DwordWrite};
pub use bar::{BarError, BarKind, BarSet};
pub use capability::{ChainError, VendorCapability};
pub use config::{ConfigShape, ConfigSpace, Identity, Role, ShapeError};
pub use ecam::{ConfigPorts, ConfigTarget, ECAM_BUS_LEN, ecam_read, ecam_write};
pub use function::{Device, Effects, ResetKind, VfChange, Window, WindowId};
pub use host_bridge::HostBridge;
pub use id::{BarIndex, Bdf, IdError, Rid, VfIndex};
pub use msix::{Msix, MsixShape};
pub use pcie::Pcie;
pub use power::Power;
pub use sriov::{Sriov, SriovError, SriovShape};
pub use state::{ConfigState, MsixState, RestoreError, STATE_VERSION, SriovState};
pub use topology::{Placement, Topology, TopologyError, VfPlacement};
