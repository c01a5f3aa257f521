//! Pools: what the PF's registers let each of them receive and send (`Virtualization`).

use crate::mac::Mac;
use crate::queue::{self, QUEUES};
use crate::registers::Registers;
use crate::spec;

/// The tag that the NIC inserts into each frame of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortVlan {
    /// VLAN, 0 to 4095.
    pub vlan: u16,
    /// Priority, 0 to 7.
    pub priority: u8,
}

/// A destination address, as a pool's filters see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// An address of the pool, unicast or group.
    Own,
    /// A unicast address whose hash UTA has.
    HashedUnicast,
    /// Another unicast address.
    OtherUnicast,
    /// A group whose hash MTA has.
    HashedGroup,
    /// Another group.
    OtherGroup,
    /// All stations.
    Broadcast,
}

/// The VLAN of a frame: `None` without a tag.
pub type Tag = Option<u16>;

/// A pool: a port of the NIC's switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Number of the pool, 0 to 63.
    pub index: u16,
    /// The queues of each direction.
    pub queues: std::ops::Range<u16>,
    /// VFRE: it receives.
    pub receives: bool,
    /// VFTE: it sends.
    pub sends: bool,
    /// The addresses, at most 128.
    pub addresses: Vec<Mac>,
    /// UPE of VMOLR and of FCTRL: it receives all unicast addresses.
    pub all_unicast: bool,
    /// ROPE: it receives unicast addresses that UTA has.
    pub hashed_unicast: bool,
    /// MPE: it receives all groups.
    pub all_groups: bool,
    /// ROMPE, with MCSTCTRL.MFE: it receives groups that MTA has.
    pub hashed_groups: bool,
    /// BAM of VMOLR and of FCTRL: it receives broadcasts.
    pub broadcast: bool,
    /// AUPE: it receives frames without a tag.
    pub untagged: bool,
    /// VLANs that it receives, a bit for each.
    pub vlans: Box<[u32; 128]>,
    /// VMVIR: tag that its frames get.
    pub port_vlan: Option<PortVlan>,
    /// QDE: the tags of its port VLAN are not shown to it.
    pub hides_vlan: bool,
    /// PFVFSPOOF: its frames must have one of its addresses as source.
    pub checks_mac: bool,
    /// PFVFSPOOF: its frames must be of its VLANs.
    pub checks_vlan: bool,
    /// PFVFSPOOF: its frames must not have the types that ETQF reserves.
    pub checks_type: bool,
    /// Largest rate, in Mbit/s: the largest of the queues', if all of them are limited.
    pub rate: Option<u32>,
    /// VMTXSW: it may receive its own frames.
    pub reflects: bool,
}

fn bit(registers: &Registers, first: u32, index: u16) -> bool {
    let index = u32::from(index);
    registers.get(first + 4 * (index / 32)) >> (index % 32) & 1 != 0
}

/// The VLANs that pass the filter of the whole NIC.
fn filtered(registers: &Registers) -> [u32; 128] {
    let mut vlans = [u32::MAX; 128];
    if registers.get(spec::VLNCTRL) & spec::VLNCTRL_VFE != 0 {
        for (offset, bits) in (spec::VFTA..).step_by(4).zip(&mut vlans) {
            *bits = registers.get(offset);
        }
    }
    vlans
}

/// True if virtualization is on, so that pools differ.
fn has_pools(registers: &Registers) -> bool {
    registers.get(spec::VT_CTL) & spec::VT_CTL_ENABLE != 0 && queue::per_pool(registers) != 0
}

/// The VLANs of VLVF whose bitmap has the pool.
fn members(registers: &Registers, pool: u16) -> [u32; 128] {
    let mut vlans = [0; 128];
    for n in 0..64 {
        let entry = registers.get(spec::VLVF + 4 * n);
        let has = entry & spec::VLVF_VIEN != 0 && bit(registers, spec::VLVFB + 8 * n, pool);
        if let Some(bits) = usize::try_from(entry >> 5 & 0x7f).ok().and_then(|at| vlans.get_mut(at)).filter(|_| has) {
            *bits |= 1 << (entry & 31);
        }
    }
    vlans
}

/// The rate of a queue, in Mbit/s; `None` if it is not limited.
fn rate(register: u32) -> Option<u32> {
    // A factor of the link's speed with 14 fractional bits.
    let factor = register & 0x00ff_ffff;
    let limited = register & spec::RTTBCNRC_ENABLE != 0;
    (spec::LINK_SPEED << 14).checked_div(factor).filter(|_| limited)
}

impl Pool {
    /// The pool of this number. Without virtualization, pool 0 is the whole NIC and the others receive nothing.
    pub(crate) fn of(registers: &Registers, rates: &[u32; 128], drops: &[u32; 128], index: u16) -> Self {
        let index = index.min(63);
        let pooled = has_pools(registers);
        let per_pool = if pooled { queue::per_pool(registers) } else { QUEUES };
        let first = index.saturating_mul(per_pool).min(QUEUES);
        let queues = first..first.saturating_add(per_pool).min(QUEUES);
        let exists = pooled && !queues.is_empty() || index == 0;
        let (filter, offload) = (registers.get(spec::FCTRL), registers.get(spec::VMOLR + 4 * u32::from(index)));
        // A bit of VMOLR; without pools, the receiver is the whole NIC, and the bit of `alone`.
        let set = |bit: u32, alone: bool| if pooled { offload & bit != 0 } else { alone };
        let insertion = registers.get(spec::VMVIR + 4 * u32::from(index));
        let spoof = registers.get(spec::PFVFSPOOF + 4 * u32::from(index / 8)) >> (index % 8);
        let (in_queues, rates) = (usize::from(queues.start)..usize::from(queues.end), rates.as_slice());
        let limits = rates.get(in_queues.clone()).unwrap_or(&[]).iter().map(|register| rate(*register));
        let hashes = registers.get(spec::MCSTCTRL) & spec::MCSTCTRL_MFE != 0;
        let mut vlans = Box::new(filtered(registers));
        if pooled && offload & spec::VMOLR_VPE == 0 {
            let members = members(registers, index);
            vlans.iter_mut().zip(members).for_each(|(bits, members)| *bits &= members);
        }
        Self {
            index,
            receives: exists && (!pooled || bit(registers, spec::VFRE, index)),
            sends: exists && (!pooled || bit(registers, spec::VFTE, index)),
            addresses: addresses(registers, pooled.then_some(index)),
            all_unicast: filter & spec::FCTRL_UPE != 0 && set(spec::VMOLR_UPE, true),
            hashed_unicast: set(spec::VMOLR_ROPE, true),
            all_groups: set(spec::VMOLR_MPE, filter & spec::FCTRL_MPE != 0),
            hashed_groups: hashes && set(spec::VMOLR_ROMPE, true),
            broadcast: filter & spec::FCTRL_BAM != 0 && set(spec::VMOLR_BAM, true),
            untagged: set(spec::VMOLR_AUPE, true),
            vlans,
            port_vlan: port_vlan(insertion).filter(|_| pooled),
            hides_vlan: drops.get(in_queues).is_some_and(|queues| queues.iter().any(|d| d & spec::QDE_HIDE_VLAN != 0)),
            checks_mac: pooled && spoof & 1 != 0,
            checks_vlan: pooled && spoof & 1 << 8 != 0,
            checks_type: pooled && spoof & 1 << 16 != 0,
            rate: limits.collect::<Option<Vec<_>>>().and_then(|limits| limits.into_iter().max()),
            reflects: bit(registers, spec::VMTXSW, index),
            queues,
        }
    }

    /// True if `vlan` is one that the pool receives.
    pub fn has_vlan(&self, vlan: u16) -> bool {
        self.vlans.get(usize::from(vlan / 32)).is_some_and(|bits| bits >> (vlan % 32) & 1 != 0)
    }

    /// True if the pool receives a frame for this destination with this tag.
    pub fn accepts(&self, destination: Destination, tag: Tag) -> bool {
        let in_vlan = tag.map_or(self.untagged, |vlan| self.has_vlan(vlan));
        let for_it = match destination {
            Destination::Own => true,
            Destination::HashedUnicast => self.hashed_unicast || self.all_unicast,
            Destination::OtherUnicast => self.all_unicast,
            Destination::HashedGroup => self.hashed_groups || self.all_groups,
            Destination::OtherGroup => self.all_groups,
            Destination::Broadcast => self.broadcast,
        };
        self.receives && in_vlan && for_it
    }
}

/// The valid addresses of a pool, or all of them.
fn addresses(registers: &Registers, pool: Option<u16>) -> Vec<Mac> {
    let mut addresses = Vec::new();
    for n in 0..128 {
        let (low, high) = (registers.get(spec::RAL + 8 * n), registers.get(spec::RAL + 8 * n + 4));
        let selected = pool.is_none_or(|pool| bit(registers, spec::MPSAR + 8 * n, pool));
        if high & spec::RAH_AV != 0 && selected {
            addresses.push(Mac::from_registers(low, high));
        }
    }
    addresses
}

/// The tag of a VMVIR register that always inserts it.
fn port_vlan(register: u32) -> Option<PortVlan> {
    let [low, high, ..] = register.to_le_bytes();
    let vlan = u16::from_le_bytes([low, high & 0xf]);
    (register >> 30 == 1).then_some(PortVlan { vlan, priority: high >> 5 })
}

impl Destination {
    /// Classifies `address` for `pool`.
    pub(crate) fn of(registers: &Registers, pool: &Pool, address: Mac) -> Self {
        if address == Mac::BROADCAST {
            return Self::Broadcast;
        }
        if pool.addresses.contains(&address) {
            return Self::Own;
        }
        let hash = address.hash(registers.get(spec::MCSTCTRL));
        match (address.is_group(), bit(registers, if address.is_group() { spec::MTA } else { spec::UTA }, hash)) {
            (false, true) => Self::HashedUnicast,
            (false, false) => Self::OtherUnicast,
            (true, true) => Self::HashedGroup,
            (true, false) => Self::OtherGroup,
        }
    }
}
