//! The rings of a port: virtqueues, or rings of descriptors, as an emulated X550 has.
//!
//! The switch forwards frames from any kind to any other. What it does with a frame is in [`rx_run`](super::rx_run) and
//! [`tx_batch`](super::tx_batch); what only one kind of ring needs is here.

mod room;
mod send_ring;
mod supply;
mod virtqueue_receive;
mod virtqueue_room;
mod virtqueue_send;
pub(crate) mod x550;

pub(crate) use room::Room;
pub(crate) use send_ring::{Ended, Packet, SendRing, Taken};
pub(crate) use supply::{Lack, Supply};
pub(crate) use virtqueue_receive::VirtqueueReceive;
pub(crate) use virtqueue_room::VirtqueueScratch;
pub(crate) use virtqueue_send::{SendScratch, VirtqueueSend, VirtqueueTx};
