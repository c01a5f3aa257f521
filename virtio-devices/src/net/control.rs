//! The control queue (`virtio 1.4 §5.1.6.5`).

mod outcome;

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_net::*;
use vmm_sys_util::eventfd::EventFd;

use self::outcome::{Refused, line};
use super::counters::Counter;
use super::enforced::PolicyCell;
use super::filter::{Addresses, Mac, Mode, is_multicast};
use super::pass::Pass;
use super::state::NetState;
use crate::DmaView;
use crate::backend::{QueueRunner, TapQueue};
use crate::frames::net_protocol::Offloads;
use crate::frames::net_protocol::features::{guest_offload_bits, guest_offloads};
use crate::queue::iovecs::{IoVecs, Storage, divide};
use crate::queue::ring::{BrokenRing, Chain, Ring, Used};
use crate::transport::features::has;

/// The most commands per call, so that frames do not wait for them.
const BATCH: usize = 16;
/// The longest command in bytes: tables of some ten thousand addresses. No driver has as many.
const MAX_COMMAND: usize = 64 * 1024;

/// A backend that commands of the driver change.
pub(crate) trait Commanded {
    /// Restricts the offloaded frames that the backend delivers to these kinds.
    ///
    /// # Errors
    ///
    /// Fails if the backend refuses; it then continues as before.
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()>;
}

impl Commanded for TapQueue {
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        self.set_offloads(offloads)
    }
}

impl Commanded for dyn QueueRunner {
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        self.set_offloads(offloads)
    }
}

/// A control queue.
pub(crate) struct Control<'q> {
    ring: Ring<'q>,
    features: u64,
    /// The number of queue pairs.
    pairs: u16,
    /// The events that wake the workers of the other queue pairs.
    peers: Vec<Arc<EventFd>>,
    storage: [Storage; 2],
}

impl<'q> Control<'q> {
    /// Takes commands from `ring`.
    pub(crate) fn new(ring: Ring<'q>, features: u64, pairs: u16, peers: Vec<Arc<EventFd>>) -> Self {
        Self { ring, features, pairs, peers, storage: Default::default() }
    }

    /// The ring, for use by another owner.
    pub(crate) fn into_ring(self) -> Ring<'q> {
        self.ring
    }

    /// Executes the commands that the driver has made available. Returns true if there may be more.
    pub(crate) fn run(&mut self, pass: &mut Pass<'_, impl Commanded + ?Sized>) -> Result<bool, BrokenRing> {
        self.run_some(BATCH, pass)
    }

    /// Executes at most `most` commands.
    pub(crate) fn run_some(
        &mut self,
        most: usize,
        pass: &mut Pass<'_, impl Commanded + ?Sized>,
    ) -> Result<bool, BrokenRing> {
        for _ in 0..most {
            let Some(chain) = self.ring.next(pass.memory)? else {
                pass.interrupt(&mut self.ring)?;
                return self.ring.expect_doorbell(pass.memory);
            };
            let head = chain.head_index();
            let len = self.answer(chain, pass.memory, pass);
            self.ring.give_back(pass.memory, &[Used { head, len }])?;
        }
        pass.interrupt(&mut self.ring)?;
        Ok(true)
    }

    /// Executes one command and writes its result, if there is a byte for it. Returns the number of bytes written.
    fn answer<'m>(
        &mut self,
        chain: Chain<'m>,
        memory: &'m DmaView,
        pass: &mut Pass<'_, impl Commanded + ?Sized>,
    ) -> u32 {
        let mut storage = std::mem::take(&mut self.storage);
        let [readable, writable] = &mut storage;
        let (mut command, mut reply) = (IoVecs::new(readable), IoVecs::new(writable));
        let mut code = None;
        let result = match divide(memory, chain, &mut command, &mut reply) {
            // Without a byte for the result the driver could not learn the outcome.
            Ok(()) if command.bytes() <= MAX_COMMAND && reply.bytes() > 0 => {
                self.carry_out(&mut command, &mut code, pass)
            }
            _ => Err(Refused::Buffers),
        };
        if let Some(log) = pass.log {
            log.log(|| line(code, result));
        }
        let (ack, counter) = match result {
            Ok(()) => (VIRTIO_NET_OK, Counter::ControlCommands),
            Err(_) => (VIRTIO_NET_ERR, Counter::ControlRefused),
        };
        pass.tally.count(counter);
        let written = reply.write_at(0, &[ack as u8]);
        self.storage = storage;
        written as u32
    }

    /// Executes `command`. Leaves its class and number in `code`.
    fn carry_out(
        &self,
        command: &mut IoVecs<'_, '_>,
        code: &mut Option<[u8; 2]>,
        pass: &Pass<'_, impl Commanded + ?Sized>,
    ) -> Result<(), Refused> {
        let [class, number] = take(command)?;
        *code = Some([class, number]);
        let (class, number) = (u32::from(class), u32::from(number));
        self.need(match class {
            VIRTIO_NET_CTRL_RX if number > VIRTIO_NET_CTRL_RX_ALLMULTI => VIRTIO_NET_F_CTRL_RX_EXTRA,
            VIRTIO_NET_CTRL_RX => VIRTIO_NET_F_CTRL_RX,
            VIRTIO_NET_CTRL_MAC if number == VIRTIO_NET_CTRL_MAC_ADDR_SET => VIRTIO_NET_F_CTRL_MAC_ADDR,
            VIRTIO_NET_CTRL_MAC => VIRTIO_NET_F_CTRL_RX,
            VIRTIO_NET_CTRL_VLAN => VIRTIO_NET_F_CTRL_VLAN,
            VIRTIO_NET_CTRL_MQ => VIRTIO_NET_F_MQ,
            VIRTIO_NET_CTRL_ANNOUNCE => VIRTIO_NET_F_GUEST_ANNOUNCE,
            VIRTIO_NET_CTRL_GUEST_OFFLOADS => VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
            _ => return Err(Refused::Unknown),
        })?;
        match (class, number) {
            (VIRTIO_NET_CTRL_RX, number) => set_mode(number, command, pass.state),
            (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET) => set_table(command, pass.state),
            (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET) => set_mac(command, pass.state, pass.policy),
            (VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_ADD) => set_vlan(true, command, pass.state),
            (VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_DEL) => set_vlan(false, command, pass.state),
            // The driver has seen the request for an announcement, and makes it now.
            (VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK) => {
                pass.state.set_announce(false);
                Ok(())
            }
            (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET) => self.set_pairs(command, pass.state),
            (VIRTIO_NET_CTRL_GUEST_OFFLOADS, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET) => self.set_offloads(command, pass),
            _ => Err(Refused::Unknown),
        }
    }

    fn need(&self, feature: u32) -> Result<(), Refused> {
        if has(self.features, feature) { Ok(()) } else { Err(Refused::Feature(feature)) }
    }

    fn set_pairs(&self, command: &mut IoVecs<'_, '_>, state: &NetState) -> Result<(), Refused> {
        let pairs = u16::from_le_bytes(take(command)?);
        if !(1..=self.pairs).contains(&pairs) {
            return Err(Refused::Pairs { wanted: pairs, most: self.pairs });
        }
        state.set_active_pairs(pairs);
        // Each worker attaches or detaches its own queue of the backend.
        for peer in &self.peers {
            // A full counter wakes as well.
            let _ = peer.write(1);
        }
        Ok(())
    }

    fn set_offloads(
        &self,
        command: &mut IoVecs<'_, '_>,
        pass: &Pass<'_, impl Commanded + ?Sized>,
    ) -> Result<(), Refused> {
        let wanted = u64::from_le_bytes(take(command)?);
        if wanted & !(self.features & guest_offload_bits()) != 0 {
            return Err(Refused::Offloads(wanted));
        }
        let offloads = guest_offloads(wanted);
        pass.backend.set_offloads(offloads).map_err(|_| Refused::Backend)?;
        pass.state.set_offloads(offloads);
        Ok(())
    }
}

fn take<const N: usize>(command: &mut IoVecs<'_, '_>) -> Result<[u8; N], Refused> {
    let mut data = [0; N];
    if command.take_front(&mut data) { Ok(data) } else { Err(Refused::Short) }
}

fn set_mode(number: u32, command: &mut IoVecs<'_, '_>, state: &NetState) -> Result<(), Refused> {
    let mode = match number {
        VIRTIO_NET_CTRL_RX_PROMISC => Mode::Promiscuous,
        VIRTIO_NET_CTRL_RX_ALLMULTI => Mode::AllMulticast,
        VIRTIO_NET_CTRL_RX_ALLUNI => Mode::AllUnicast,
        VIRTIO_NET_CTRL_RX_NOMULTI => Mode::NoMulticast,
        VIRTIO_NET_CTRL_RX_NOUNI => Mode::NoUnicast,
        VIRTIO_NET_CTRL_RX_NOBCAST => Mode::NoBroadcast,
        _ => return Err(Refused::Unknown),
    };
    let [on] = take(command)?;
    state.change_filter(|filter| filter.set_mode(mode, on != 0));
    Ok(())
}

/// Sets both tables or none: nothing changes before the whole command has been read.
fn set_table(command: &mut IoVecs<'_, '_>, state: &NetState) -> Result<(), Refused> {
    let unicast = take_addresses(command)?;
    let multicast = take_addresses(command)?;
    state.change_filter(|filter| {
        filter.unicast = unicast.clone();
        filter.multicast = multicast.clone();
    });
    Ok(())
}

fn take_addresses(command: &mut IoVecs<'_, '_>) -> Result<Addresses, Refused> {
    let entries = u32::from_le_bytes(take(command)?);
    let mut addresses = Addresses::new();
    // A number that is larger than the command ends with the command.
    for _ in 0..entries {
        addresses.add(take(command)?);
    }
    Ok(addresses)
}

fn set_mac(command: &mut IoVecs<'_, '_>, state: &NetState, policy: &PolicyCell) -> Result<(), Refused> {
    let mac: Mac = take(command)?;
    if is_multicast(&mac) || mac == [0; 6] {
        return Err(Refused::NotUnicast);
    }
    // An address that the host gave is set again by tools that set up every function.
    if policy.load().policy.fixed_address().is_some_and(|fixed| mac != fixed) {
        return Err(Refused::FixedMac);
    }
    let changed = mac != state.mac();
    state.set_mac(mac);
    if changed {
        policy.note_address(mac);
    }
    Ok(())
}

fn set_vlan(wanted: bool, command: &mut IoVecs<'_, '_>, state: &NetState) -> Result<(), Refused> {
    let id = u16::from_le_bytes(take(command)?);
    // An invalid id is refused before the filter is copied.
    if id >= 4096 {
        return Err(Refused::Vlan(id));
    }
    state.change_filter(|filter| {
        filter.set_vlan(id, wanted);
    });
    Ok(())
}
