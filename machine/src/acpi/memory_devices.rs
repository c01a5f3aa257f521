//! The part of the DSDT that describes memory that can be added (`ACPI 6.5 §9.11`): the AML that uses the registers of
//! `acpi/memory_hotplug.rs`.

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, CreateQWordField, Device, EISAName, Field, FieldAccessType, FieldEntry,
    FieldLockRule, FieldUpdateRule, If, Local, Method, Name, Notify, OpRegion, OpRegionSpace, Path, ResourceTemplate,
    Return, Scope, Store, ZERO,
};
use acpi_tables::{Aml, AmlSink};

use crate::acpi::memory_hotplug::{ADDED, BANK, BASE, LAST, LENGTH, PORTS, SLOTS, STATUS};
use crate::arch::x86_64::layout::MEMORY_PORT;

/// The method that notifies the guest of regions that were added.
pub(crate) const SCAN: &str = "\\_SB_.MEMS.MSCN";

/// A region was added (`ACPI 6.5 §5.6.6`). There is nothing below it to rescan.
const DEVICE_CHECK: u8 = 1;
/// _STA: present, enabled, shown and functioning (`ACPI 6.5 §6.3.7`).
const PRESENT_STATUS: u8 = 0xf;
/// The fields of a QWORD address space descriptor (`ACPI 6.5 §6.4.3.5.1`), in bytes from its start.
const MINIMUM: u8 = 14;
/// The last address.
const MAXIMUM: u8 = 22;
/// The length.
const LEN: u8 = 38;

/// The memory devices of all slots.
pub(crate) struct MemoryDevices;

impl MemoryDevices {
    /// The 64-bit register fields of the slots.
    fn numbers() -> Vec<FieldEntry> {
        let reserved = |bytes: u16| FieldEntry::Reserved(usize::from(bytes) * 8);
        let mut fields = vec![reserved(BANK)];
        for slot in Self::slots() {
            fields.extend([b'B', b'L', b'N'].map(|letter| FieldEntry::Named(slot.name(letter), 64)));
            fields.push(reserved(BANK - STATUS));
        }
        fields
    }

    /// The register fields that are bytes.
    fn bytes() -> Vec<FieldEntry> {
        let reserved = |bytes: u16| FieldEntry::Reserved(usize::from(bytes) * 8);
        let mut fields = vec![reserved(ADDED), FieldEntry::Named(*b"ADDD", 8), reserved(BANK - ADDED - 1)];
        for slot in Self::slots() {
            fields.extend([reserved(STATUS), FieldEntry::Named(slot.name(b'P'), 1)]);
            fields.extend([FieldEntry::Reserved(7), reserved(BANK - STATUS - 1)]);
        }
        fields
    }

    fn slots() -> impl Iterator<Item = MemorySlot> {
        (0..SLOTS).map(MemorySlot)
    }
}

impl Aml for MemoryDevices {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        // Two 64-bit numbers follow each other without a gap.
        const _: () = assert!(BASE == 0 && LAST == 8 && LENGTH == 16 && STATUS == 24);
        let registers = || Path::new("REGS");
        let (hid, uid) =
            (Name::new(Path::new("_HID"), &EISAName::new("PNP0A06")), Name::new(Path::new("_UID"), &"mem"));
        let region = OpRegion::new(registers(), OpRegionSpace::SystemIO, &MEMORY_PORT, &PORTS);
        let field =
            |access, fields| Field::new(registers(), access, FieldLockRule::NoLock, FieldUpdateRule::Preserve, fields);
        let numbers = field(FieldAccessType::DWord, Self::numbers());
        let bytes = field(FieldAccessType::Byte, Self::bytes());
        let slots: Vec<_> = Self::slots().collect();
        let scan = Method::new(Path::new("MSCN"), 0, true, vec![&Scan]);
        let mut children: Vec<&dyn Aml> = vec![&hid, &uid, &region, &numbers, &bytes];
        children.extend(slots.iter().map(|slot| slot as &dyn Aml));
        children.push(&scan);
        Scope::new(Path::new("\\_SB_"), vec![&Device::new(Path::new("MEMS"), children)]).to_aml_bytes(sink);
    }
}

/// The memory device of a slot.
struct MemorySlot(u8);

impl MemorySlot {
    /// A letter and the slot's number.
    fn name(&self, letter: u8) -> [u8; 4] {
        [letter, b'0', b'0', b'0' + self.0]
    }

    fn path(&self, letter: u8) -> Path {
        Path::new(&self.name(letter).map(char::from).iter().collect::<String>())
    }
}

impl Aml for MemorySlot {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let hid = Name::new(Path::new("_HID"), &EISAName::new("PNP0C80"));
        let uid = Name::new(Path::new("_UID"), &self.0);
        let present = self.path(b'P');
        let is_present = Return::new(&PRESENT_STATUS);
        let (if_present, is_absent) = (If::new(&present, vec![&is_present]), Return::new(&ZERO));
        let status = Method::new(Path::new("_STA"), 0, true, vec![&if_present, &is_absent]);
        // The AML fills in the numbers. None may be 0 in the template, or the descriptor would get another form.
        let space = AddressSpace::new_memory(AddressSpaceCacheable::Cacheable, true, 0u64, u64::MAX - 1, None);
        let template = ResourceTemplate::new(vec![&space]);
        let (buffer, names) = (Path::new("MR64"), ["MINI", "MAXI", "LENG"].map(Path::new));
        let [minimum, maximum, len] = &names;
        let descriptor = Name::new(Path::new("MR64"), &template);
        let fields = [
            CreateQWordField::new(minimum, &buffer, &MINIMUM),
            CreateQWordField::new(maximum, &buffer, &MAXIMUM),
            CreateQWordField::new(len, &buffer, &LEN),
        ];
        let values = [b'B', b'L', b'N'].map(|letter| self.path(letter));
        let stores: Vec<_> = names.iter().zip(&values).map(|(name, value)| Store::new(name, value)).collect();
        let result = Return::new(&buffer);
        let mut body: Vec<&dyn Aml> = vec![&descriptor];
        body.extend(fields.iter().map(|field| field as &dyn Aml));
        body.extend(stores.iter().map(|store| store as &dyn Aml));
        body.push(&result);
        let resources = Method::new(Path::new("_CRS"), 0, true, body);
        Device::new(self.path(b'M'), vec![&hid, &uid, &status, &resources]).to_aml_bytes(sink);
    }
}

/// AML that notifies each slot of its region.
struct Scan;

impl Aml for Scan {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let news = Local(0);
        Store::new(&news, &Path::new("ADDD")).to_aml_bytes(sink);
        for slot in MemoryDevices::slots() {
            let (bit, device) = (1u8 << slot.0, slot.path(b'M'));
            let notify = Notify::new(&device, &DEVICE_CHECK);
            If::new(&And::new(&ZERO, &news, &bit), vec![&notify]).to_aml_bytes(sink);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aml() -> Vec<u8> {
        let mut bytes = Vec::new();
        MemoryDevices.to_aml_bytes(&mut bytes);
        bytes
    }

    fn contains(bytes: &[u8], part: &[u8]) -> bool {
        bytes.windows(part.len()).any(|window| window == part)
    }

    /// Fields as a guest places them: for each name the first bit and the length in the register file.
    fn placed(fields: Vec<FieldEntry>) -> Vec<(String, usize, usize)> {
        let mut at = 0;
        let placed = fields.into_iter().filter_map(|field| match field {
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
        let (numbers, bytes) = (placed(MemoryDevices::numbers()), placed(MemoryDevices::bytes()));
        assert_eq!((numbers.len(), bytes.len()), (24, 9));
        assert!(bytes.contains(&("ADDD".to_string(), 0, 8)));
        for slot in 0..usize::from(SLOTS) {
            let bank = 8 * usize::from(BANK) * (slot + 1);
            for (letter, register, fields, len) in [
                ("B", BASE, &numbers, 64),
                ("L", LAST, &numbers, 64),
                ("N", LENGTH, &numbers, 64),
                ("P", STATUS, &bytes, 1),
            ] {
                let expected = (format!("{letter}00{slot}"), bank + 8 * usize::from(register), len);
                assert!(fields.contains(&expected), "{expected:?}");
            }
        }
    }

    #[test]
    fn each_slot_is_a_memory_device_notified_of_its_own_bit() {
        let bytes = aml();
        // Name(_HID, EisaId("PNP0C80")), Name(_UID, n)
        for slot in 0..SLOTS {
            assert!(contains(
                &bytes,
                &[b'M', b'0', b'0', b'0' + slot, 8, b'_', b'H', b'I', b'D', 0x0c, 0x41, 0xd0, 0x0c, 0x80]
            ));
            let bit = 1u8 << slot;
            let bit = if bit == 1 { vec![1] } else { vec![0x0a, bit] };
            let notify = [&[0x7b, 0x60][..], &bit, &[0, 0x86, b'M', b'0', b'0', b'0' + slot, 1]].concat();
            assert!(contains(&bytes, &notify), "{slot}");
        }
    }
}
