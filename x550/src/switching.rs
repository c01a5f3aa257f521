//! Registers of the NIC's switch that concern all pools.

use crate::queue;
use crate::registers::Registers;
use crate::spec;

/// A mirror rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirror {
    /// The pool that gets copies, 0 to 63.
    pub to: u8,
    /// Pools whose received frames are copied, a bit each.
    pub pools: u64,
    /// VLANs whose frames are copied.
    pub vlans: Vec<u16>,
    /// True if frames that arrive from the uplink are copied.
    pub from_uplink: bool,
    /// True if frames that leave to the uplink are copied.
    pub to_uplink: bool,
}

/// State of the switch beyond its pools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Switching {
    /// Number of pools, 16, 32 or 64; 1 without virtualization.
    pub pools: u16,
    /// True if pools send frames to each other (VEB); false if all frames go to the uplink (VEPA).
    pub is_veb: bool,
    /// True if frames for several pools are copied to each; otherwise only one of them gets a frame.
    pub replicates: bool,
    /// HLREG0.LPBK, without virtualization: the NIC receives what it sends, and nothing else.
    pub loops_back: bool,
    /// The pool of frames that no pool accepts.
    pub default_pool: Option<u8>,
    /// The pool of the PF, which its driver sets as the default one, disabled or not.
    pub pf_pool: u8,
    /// True if the default pool gets unicast frames for addresses that the NIC does not have.
    pub all_unicast: bool,
    /// True if the default pool gets frames for groups that the NIC does not have.
    pub all_groups: bool,
    /// The rules that copy something.
    pub mirrors: Vec<Mirror>,
}

impl Switching {
    pub(crate) fn of(registers: &Registers) -> Self {
        let (control, filter) = (registers.get(spec::VT_CTL), registers.get(spec::FCTRL));
        let per_pool = queue::per_pool(registers);
        let is_on = control & spec::VT_CTL_ENABLE != 0 && per_pool != 0;
        let [field, ..] = (control >> 7 & 0x3f).to_le_bytes();
        let pf_pool = if is_on { field } else { 0 };
        Self {
            pools: if is_on { queue::QUEUES / per_pool.max(1) } else { 1 },
            is_veb: is_on && registers.get(spec::PFDTXGSWC) & spec::PFDTXGSWC_VMDLBEN != 0,
            replicates: is_on && control & spec::VT_CTL_REPLICATE != 0,
            loops_back: !is_on && registers.get(spec::HLREG0) & spec::HLREG0_LPBK != 0,
            default_pool: (control & spec::VT_CTL_DIS_DEFPL == 0).then_some(pf_pool),
            pf_pool,
            all_unicast: filter & spec::FCTRL_UPE != 0,
            all_groups: filter & spec::FCTRL_MPE != 0,
            mirrors: (0..4).filter(|_| is_on).filter_map(|rule| mirror(registers, rule)).collect(),
        }
    }
}

/// The rule of this number, if it copies anything.
fn mirror(registers: &Registers, rule: u32) -> Option<Mirror> {
    let control = registers.get(spec::MRCTL + 4 * rule);
    let halves = |first: u32| {
        let (low, high) = (registers.get(first + 4 * rule), registers.get(first + 4 * (rule + 4)));
        u64::from(low) | u64::from(high) << 32
    };
    let entries = if control & 8 != 0 { halves(spec::VMRVLAN) } else { 0 };
    let vlan = |n: u32| {
        let entry = registers.get(spec::VLVF + 4 * n);
        u16::try_from(entry & 0xfff).ok().filter(|_| entry & spec::VLVF_VIEN != 0)
    };
    let [_, to, ..] = control.to_le_bytes();
    let mirror = Mirror {
        to,
        pools: if control & 1 != 0 { halves(spec::VMRVM) } else { 0 },
        vlans: (0..64).filter(|n| entries >> n & 1 != 0).filter_map(vlan).collect(),
        from_uplink: control & 2 != 0,
        to_uplink: control & 4 != 0,
    };
    let copies = mirror.pools != 0 || !mirror.vlans.is_empty() || mirror.from_uplink || mirror.to_uplink;
    copies.then_some(mirror)
}
