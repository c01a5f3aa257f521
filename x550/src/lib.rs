//! An Intel X550 NIC with 63 VFs, or an X540: its registers, as a state machine.
//!
//! The crate knows the registers of the PF and its VFs in BAR 0, and the configuration spaces of both. It knows no
//! operating system, no thread, no guest memory and no switch. An access changes registers and returns [`Effects`]: the
//! interrupts to send, and the parts whose meaning may have changed. The caller asks for these: [`Nic::pool`],
//! [`Nic::switching`], [`Nic::receive_queue`], [`Nic::transmit_queue`], [`Nic::flows`], [`Nic::rss`]. A guest cannot
//! cause an error, only an effect.
//!
//! Registers have the names of Intel's public datasheet of the X550. Section names in comments are the datasheet's.
//!
//! | module | subject |
//! |---|---|
//! | `shape` | configuration spaces |
//! | `nic`, `resets` | an access, from bytes to the register that it reaches; resets |
//! | `spec`, `map`, `registers` | offsets and bits; writable bits and reset values; storage |
//! | `interrupts`, `vectors`, `moderation`, `timers`, `events` | causes, masks, intervals; from an event to messages |
//! | `mailbox`, `vf` | what a VF and its PF share; a VF's own registers |
//! | `nvm`, `host_interface`, `phy` | flash contents; firmware commands; MDIO |
//! | `pool`, `switching`, `queue` | plain values that a data path follows |
//! | `headers`, `flow`, `flow_registers` | fields of a frame; flow rules, and the registers that make them |
//! | `rss`, `toeplitz` | the queue of a frame, and its hash |
//! | `model` | the product: X550, or X540 |
//! | `descriptor` | descriptors of rings, as bytes |
//! | `state` | saved state |
#![forbid(unsafe_code)]
#![warn(clippy::indexing_slicing, clippy::cast_possible_truncation)]

mod access;
mod counters;
pub mod descriptor;
mod effects;
mod events;
mod flow;
mod flow_registers;
mod headers;
mod host_interface;
mod interrupts;
mod mac;
mod mailbox;
mod map;
mod model;
mod moderation;
mod nic;
mod nvm;
mod phy;
mod pool;
mod queue;
mod registers;
mod resets;
mod rss;
mod shape;
pub mod spec;
mod state;
mod switching;
mod timers;
mod toeplitz;
mod vectors;
mod vf;

pub use counters::{Counter, VfCounter};
pub use effects::{Direction, Doorbell, Effects, Place};
pub use flow::{FlowAction, Flows, Key, RuleState};
pub use mac::Mac;
pub use mailbox::{Mailbox, Owner};
pub use map::{Row, rows};
pub use model::Model;
pub use nic::Nic;
pub use phy::Phy;
pub use pool::{Destination, Pool, PortVlan, Tag};
pub use queue::{ReceiveQueue, TransmitQueue};
pub use rss::{Rss, Steered};
pub use shape::{BAR0_SIZE, MSIX_BAR, REGISTERS_BAR, TOTAL_VFS, VF_BAR0_SIZE, VF_MSIX_BAR, pf_config, vf_config};
pub use state::{NicState, RestoreError, VectorsState, VfState};
pub use switching::{Mirror, Switching};
