//! The part of the DSDT that describes the vCPUs, including those that can be added: the AML that uses the registers of
//! `acpi/vcpu_hotplug.rs`.
//!
//! The MADT lists which vCPUs are present at boot (`ACPI 6.5 §5.2.12.2`); these objects report which are present now.

use acpi_tables::aml::{
    And, Arg, BufferData, Device, Equal, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Local,
    Method, Name, NotEqual, Notify, ONE, OpRegion, OpRegionSpace, Path, Return, Scope, Store, ZERO,
};
use acpi_tables::madt::{EnabledStatus, ProcessorLocalApic};
use acpi_tables::{Aml, AmlSink};

use crate::acpi::vcpu_hotplug::{ADDED, EJECT, KEEP, LEAVING, PORTS, PRESENT};
use crate::arch::x86_64::layout::PROCESSOR_PORT;
use crate::arch::x86_64::topology::Topology;

/// The method that notifies the guest of vCPUs that were added or should be removed.
pub(crate) const SCAN: &str = "\\_SB_.CPUS.CSCN";

/// A vCPU was added (`ACPI 6.5 §5.6.6`). Unlike for slots, a Device Check is safe: a processor has nothing below it to
/// rescan.
const DEVICE_CHECK: u8 = 1;
/// A vCPU should be removed. Also the source event of the guest's _OST (`ACPI 6.5 §6.3.5`).
const EJECT_REQUEST: u8 = 3;
/// The guest's _OST status while the removal is in progress (`ACPI 6.5 §6.3.5`); it then ejects the vCPU.
const EJECT_IN_PROGRESS: u8 = 0x84;
/// _STA: present, enabled, shown and functioning (`ACPI 6.5 §6.3.7`).
const PRESENT_STATUS: u8 = 0xf;

/// The processor objects of all possible vCPUs.
pub(crate) struct Processors {
    /// The number of vCPUs. IDs start at 0.
    pub count: u8,
    /// Shape of the vCPUs, which determines their local APIC IDs.
    pub topology: Topology,
}

impl Processors {
    fn ids(&self) -> impl Iterator<Item = Processor> {
        (0..self.count).map(|id| Processor { id, apic_id: self.topology.apic_id(id.into()) as u8 })
    }

    /// The register fields: one for each bit of a vCPU, and one for each port that is read as a whole.
    fn fields(&self) -> Vec<FieldEntry> {
        let bits = |letter| self.ids().map(move |processor| FieldEntry::Named(processor.name(letter), 1));
        let ports = |letter| self.ports().map(move |port| FieldEntry::Named(port.name(letter), 8));
        let mut fields = Vec::new();
        let mut end = 0;
        let mut place = |register: u16, register_fields: Vec<FieldEntry>| {
            let start = usize::from(register) * 8;
            if start > end {
                fields.push(FieldEntry::Reserved(start - end));
            }
            end = start;
            for field in register_fields {
                if let FieldEntry::Named(_, len) = &field {
                    end += len;
                }
                fields.push(field);
            }
        };
        place(PRESENT, bits(b'P').collect());
        place(ADDED, ports(b'A').collect());
        place(LEAVING, ports(b'L').collect());
        place(EJECT, bits(b'E').collect());
        place(KEEP, bits(b'K').collect());
        fields
    }

    fn ports(&self) -> impl Iterator<Item = RegisterByte> {
        let count = self.count;
        (0..count.div_ceil(8))
            .map(move |n| RegisterByte { n, processors: n * 8..n.saturating_mul(8).saturating_add(8).min(count) })
    }
}

impl Aml for Processors {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let registers = || Path::new("REGS");
        let processors: Vec<_> = self.ids().collect();
        let ports: Vec<_> = self.ports().collect();
        let (hid, uid) = (Name::new(Path::new("_HID"), &"ACPI0010"), Name::new(Path::new("_UID"), &0u8));
        let region = OpRegion::new(registers(), OpRegionSpace::SystemIO, &PROCESSOR_PORT, &PORTS);
        // Writing one vCPU's bit writes zeroes, which have no effect, to all others.
        let field = Field::new(
            registers(),
            FieldAccessType::Byte,
            FieldLockRule::NoLock,
            FieldUpdateRule::WriteAsZeroes,
            self.fields(),
        );
        let scan = Method::new(Path::new("CSCN"), 0, true, ports.iter().map(|port| port as &dyn Aml).collect());
        let mut children: Vec<&dyn Aml> = vec![&hid, &uid, &region, &field];
        children.extend(processors.iter().map(|processor| processor as &dyn Aml));
        children.push(&scan);
        Scope::new(Path::new("\\_SB_"), vec![&Device::new(Path::new("CPUS"), children)]).to_aml_bytes(sink);
    }
}

/// A vCPU's processor object.
struct Processor {
    id: u8,
    apic_id: u8,
}

impl Processor {
    fn name(&self, letter: u8) -> [u8; 4] {
        name(letter, self.id)
    }

    fn path(&self, letter: u8) -> Path {
        path(letter, self.id)
    }
}

impl Aml for Processor {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let mut apic = Vec::new();
        ProcessorLocalApic::new(self.id, self.apic_id, EnabledStatus::Enabled).to_aml_bytes(&mut apic);
        let hid = Name::new(Path::new("_HID"), &"ACPI0007");
        let uid = Name::new(Path::new("_UID"), &self.id);
        let entry = Name::new(Path::new("_MAT"), &BufferData::new(apic));
        let (present, eject, keep) = (self.path(b'P'), self.path(b'E'), self.path(b'K'));
        let is_present = Return::new(&PRESENT_STATUS);
        let if_present = If::new(&present, vec![&is_present]);
        let is_absent = Return::new(&ZERO);
        let status = Method::new(Path::new("_STA"), 0, true, vec![&if_present, &is_absent]);
        let let_go = Store::new(&eject, &ONE);
        let eject = Method::new(Path::new("_EJ0"), 1, true, vec![&let_go]);
        // _OST's arguments are the source event and the status; 0 is success.
        let keeps = Store::new(&keep, &ONE);
        let unless_soon = NotEqual::new(&Arg(1), &EJECT_IN_PROGRESS);
        let unless_soon = If::new(&unless_soon, vec![&keeps]);
        let unless_done = If::new(&Arg(1), vec![&unless_soon]);
        let asked = Equal::new(&Arg(0), &EJECT_REQUEST);
        let asked = If::new(&asked, vec![&unless_done]);
        let answer = Method::new(Path::new("_OST"), 3, true, vec![&asked]);
        let mut children: Vec<&dyn Aml> = vec![&hid, &uid, &entry, &status];
        if self.id != 0 {
            children.extend([&eject as &dyn Aml, &answer]);
        }
        Device::new(self.path(b'C'), children).to_aml_bytes(sink);
    }
}

/// Byte `n` of a register, with the vCPUs that have a bit there.
struct RegisterByte {
    n: u8,
    processors: std::ops::Range<u8>,
}

impl RegisterByte {
    fn name(&self, letter: u8) -> [u8; 4] {
        name(letter, self.n)
    }
}

impl Aml for RegisterByte {
    /// Appends AML that notifies each vCPU of the port with its events.
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let news = Local(0);
        for (register, value) in [(b'A', DEVICE_CHECK), (b'L', EJECT_REQUEST)] {
            Store::new(&news, &path(register, self.n)).to_aml_bytes(sink);
            for id in self.processors.clone() {
                let bit = 1u8 << (id % 8);
                let device = path(b'C', id);
                let notify = Notify::new(&device, &value);
                If::new(&And::new(&ZERO, &news, &bit), vec![&notify]).to_aml_bytes(sink);
            }
        }
    }
}

/// A letter and three digits.
fn name(letter: u8, n: u8) -> [u8; 4] {
    [letter, b'0' + n / 100, b'0' + n / 10 % 10, b'0' + n % 10]
}

fn path(letter: u8, n: u8) -> Path {
    Path::new(&name(letter, n).map(char::from).iter().collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(topology: Topology) -> Processors {
        Processors { count: topology.vcpus() as u8, topology }
    }

    fn aml(count: u8) -> Vec<u8> {
        let mut bytes = Vec::new();
        of(Topology::flat(count.into())).to_aml_bytes(&mut bytes);
        bytes
    }

    fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
        bytes.windows(part.len()).position(|window| window == part)
    }

    /// Fields as a guest places them: for each name the first bit and the length in the register file.
    fn fields(count: u8) -> Vec<(String, usize, usize)> {
        let mut at = 0;
        let placed = of(Topology::flat(count.into())).fields().into_iter().filter_map(|field| match field {
            FieldEntry::Named(name, len) => {
                at += len;
                Some((String::from_utf8(name.to_vec()).unwrap(), at - len, len))
            }
            FieldEntry::Reserved(len) => {
                at += len;
                None
            }
        });
        placed.collect()
    }

    #[test]
    fn each_field_is_where_the_registers_say() {
        let registers = [(b'P', PRESENT, 1), (b'A', ADDED, 8), (b'L', LEAVING, 8), (b'E', EJECT, 1), (b'K', KEEP, 1)];
        for count in [1, 8, 9, 254] {
            let fields = fields(count);
            for (letter, register, len) in registers {
                let last = if len == 1 { count - 1 } else { (count - 1) / 8 };
                let name = String::from_utf8(name(letter, last).to_vec()).unwrap();
                let expected = (name, usize::from(register) * 8 + usize::from(last) * len, len);
                assert!(fields.contains(&expected), "{expected:?} of {count}");
            }
            assert_eq!(fields.len(), 3 * usize::from(count) + 2 * usize::from(count.div_ceil(8)));
        }
    }

    #[test]
    fn each_vcpu_has_its_own_apic_and_all_but_the_first_can_go() {
        let bytes = aml(3);
        for id in 0..3 {
            let mat = [0x08, b'_', b'M', b'A', b'T', 0x11, 0x0b, 0x0a, 8, 0, 8, id, id, 1, 0, 0, 0];
            assert!(find(&bytes, &mat).is_some(), "{id}");
        }
        assert!(find(&bytes, b"C003").is_none());
        // Store(One, E001)
        assert!(find(&bytes, b"\x70\x01E001").is_some() && find(&bytes, b"\x70\x01E000").is_none());
        assert!(find(&bytes, b"\x70\x01K002").is_some() && find(&bytes, b"\x70\x01K000").is_none());
    }

    #[test]
    fn an_added_vcpu_has_the_apic_id_that_its_place_gives_it() {
        let mut bytes = Vec::new();
        of(Topology { threads: 1, cores: 3, dies: 1, packages: 2 }).to_aml_bytes(&mut bytes);
        // vCPU 3 is the first of the second package.
        assert!(find(&bytes, &[0, 8, 3, 4, 1, 0, 0, 0]).is_some());
    }

    #[test]
    fn each_vcpu_is_notified_of_its_own_bit() {
        let bytes = aml(10);
        let scan = &bytes[find(&bytes, b"CSCN").unwrap()..];
        // Local0 = A001; if (Local0 & 2) Notify(C009, 1)
        let port = &scan[find(scan, b"\x70A001\x60").unwrap()..];
        assert!(find(port, b"\x7b\x60\x0a\x02\x00\x86C009\x01").is_some());
        assert!(find(port, b"C007").is_none());
        let port = &scan[find(scan, b"\x70L001\x60").unwrap()..];
        assert!(find(port, b"\x7b\x60\x01\x00\x86C008\x0a\x03").is_some());
    }
}
