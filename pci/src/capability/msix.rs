//! MSI-X: the capability, its table and its pending bits (`PCIe 6.2 §7.7.2`).

mod shape;

pub use self::shape::{MsixError, MsixShape, MsixStructure};
use crate::spec::{capability_id, msix};
use crate::{Access, BarIndex, BarSet, Dword, DwordWrite, Effects, Refused};

/// Table entry: Message Address, Message Upper Address, Message Data, Vector Control.
type Entry = [u32; 4];

const ENTRY_RESET: Entry = [0, 0, 0, msix::VECTOR_MASK];

/// The implemented bits of each dword of an entry: the address is dword aligned, and Vector Control has only the mask
/// bit.
const ENTRY_WRITABLE: Entry = [!0b11, u32::MAX, u32::MAX, msix::VECTOR_MASK];

/// The registers of the capability, and its table.
///
/// Pending bits are not among them. A function stores its interrupts that wait in [`PendingBits`](crate::PendingBits),
/// or where its sender has them, such as in eventfds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Msix {
    shape: MsixShape,
    control: u16,
    table: Box<[Entry]>,
}

impl Msix {
    /// Creates MSI-X disabled, with all vectors masked, in a function with these BARs. For a VF, these are the VF BARs
    /// of its PF.
    ///
    /// # Errors
    ///
    /// Fails if the number of vectors, or the location of a structure, is invalid.
    pub fn new(shape: MsixShape, bars: &BarSet) -> Result<Self, MsixError> {
        shape.check(bars)?;
        Ok(Self { shape, control: 0, table: vec![ENTRY_RESET; usize::from(shape.vectors)].into() })
    }

    /// Layout of the two structures.
    pub fn shape(&self) -> &MsixShape {
        &self.shape
    }

    /// The number of vectors.
    pub fn vectors(&self) -> u16 {
        self.shape.vectors
    }

    /// True if MSI-X Enable is set.
    pub fn enabled(&self) -> bool {
        self.control & msix::ENABLE != 0
    }

    fn may_send(&self) -> bool {
        self.control & (msix::ENABLE | msix::FUNCTION_MASK) == msix::ENABLE
    }

    /// The address and data of `vector`, if MSI-X is enabled and neither the vector nor the function is masked.
    pub fn message(&self, vector: u16) -> Option<(u64, u32)> {
        match self.table.get(usize::from(vector)) {
            Some(&[low, high, data, control]) if self.may_send() && control & msix::VECTOR_MASK == 0 => {
                Some((u64::from(high) << 32 | u64::from(low), data))
            }
            _ => None,
        }
    }

    /// Reads the dword at `reg` from the start of the capability. The next pointer is 0.
    pub fn read(&self, reg: Dword) -> u32 {
        // The shape was checked: an offset fits 32 bits.
        let place =
            |(bar, offset): (BarIndex, u64)| u32::try_from(offset).unwrap_or(u32::MAX) & !0b111 | u32::from(bar.get());
        match reg.offset() {
            msix::CONTROL => {
                let control = self.control | self.shape.vectors.saturating_sub(1);
                u32::from(capability_id::MSIX) | u32::from(control) << 16
            }
            msix::TABLE => place(self.shape.table),
            msix::PBA => place(self.shape.pba),
            _ => 0,
        }
    }

    /// Writes the dword at `reg`.
    pub fn write(&mut self, reg: Dword, write: DwordWrite) -> Effects {
        if reg.offset() != msix::CONTROL {
            return Effects::NONE;
        }
        let writable = u32::from(msix::ENABLE | msix::FUNCTION_MASK) << 16;
        let [_, _, low, high] = write.apply(u32::from(self.control) << 16, writable).to_le_bytes();
        let new = u16::from_le_bytes([low, high]);
        let messages = new != self.control;
        self.control = new;
        Effects { messages, ..Effects::NONE }
    }

    fn table_dword(&self, offset: u64) -> u32 {
        let entry = usize::try_from(offset / msix::ENTRY_LEN).ok().and_then(|n| self.table.get(n));
        let dword = usize::try_from(offset % msix::ENTRY_LEN / 4).ok();
        entry.zip(dword).and_then(|(entry, dword)| entry.get(dword)).copied().unwrap_or(0)
    }

    /// Reads `data.len()` bytes of the table at `offset`; bytes beyond it read 0.
    pub fn table_read(&self, offset: u64, data: &mut [u8]) {
        read_dwords(offset, data, |offset| self.table_dword(offset));
    }

    /// Writes `data` to the table at `offset`. Software must write aligned dwords or qwords (`§7.7.2`). As in hardware,
    /// a qword is two dwords, at any multiple of 4; other widths and offsets are refused.
    pub fn table_write(&mut self, offset: u64, data: &[u8]) -> Effects {
        if !matches!(data.len(), 4 | 8) || offset % 4 != 0 {
            return Effects::refused(Refused::MsixTable { offset, len: data.len() });
        }
        let mut changed = false;
        for (dword, value) in (0..).zip(data.chunks_exact(4)) {
            let offset = offset.saturating_add(4 * dword);
            let value = value.try_into().map_or(0, u32::from_le_bytes);
            let entry = usize::try_from(offset / msix::ENTRY_LEN).ok().and_then(|n| self.table.get_mut(n));
            let dword = usize::try_from(offset % msix::ENTRY_LEN / 4).unwrap_or(0);
            let slot = entry.and_then(|entry| entry.get_mut(dword));
            if let (Some(slot), Some(&writable)) = (slot, ENTRY_WRITABLE.get(dword)) {
                let new = DwordWrite::full(value).apply(*slot, writable);
                changed |= *slot != new;
                *slot = new;
            }
        }
        // Linux fills the table while the function is masked; until it is done, no change needs to be reported.
        Effects { messages: changed && self.may_send(), ..Effects::NONE }
    }

    /// Reads `data.len()` bytes of the pending bits at `offset`; `pending` returns each vector's bit.
    pub fn pba_read(&self, offset: u64, data: &mut [u8], pending: impl Fn(u16) -> bool) {
        read_dwords(offset, data, |offset| {
            (0..32).fold(0, |dword, bit| {
                let vector = offset.checked_mul(8).and_then(|first| u16::try_from(first + bit).ok());
                let set = vector.is_some_and(|vector| vector < self.shape.vectors && pending(vector));
                dword | u32::from(set) << bit
            })
        });
    }

    /// Reads `data.len()` bytes at `offset` of `bar`, if the table or the pending bits are there. Returns false if they
    /// are not; `data` is unchanged then.
    ///
    /// `raised` returns true for a vector whose interrupt was raised and possibly not sent. Such a vector reads as
    /// pending unless its message can be sent now: it is sent, or about to be. `may_send` is true if the function may
    /// send messages ([`Device::may_send`](crate::Device::may_send)).
    pub fn bar_read(
        &self,
        bar: BarIndex,
        offset: u64,
        data: &mut [u8],
        may_send: bool,
        raised: impl Fn(u16) -> bool,
    ) -> bool {
        match self.shape.locate(bar, offset) {
            Some((MsixStructure::Table, offset)) => self.table_read(offset, data),
            Some((MsixStructure::PendingBits, offset)) => {
                let sent = |vector| may_send && self.message(vector).is_some();
                self.pba_read(offset, data, |vector| raised(vector) && !sent(vector));
            }
            None => return false,
        }
        true
    }

    /// Writes `data` at `offset` of `bar`, if the table or the pending bits are there; `None` if they are not. Pending
    /// bits are read-only.
    pub fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8]) -> Option<Effects> {
        Some(match self.shape.locate(bar, offset)? {
            (MsixStructure::Table, offset) => self.table_write(offset, data),
            (MsixStructure::PendingBits, _) => Effects::NONE,
        })
    }

    /// Returns to the power-on state.
    pub fn reset(&mut self) {
        let Self { shape: _, control, table } = self;
        *control = 0;
        table.fill(ENTRY_RESET);
    }
}

/// Reads bytes of an array of dwords, within one dword or as whole dwords; other reads return all-ones.
fn read_dwords(offset: u64, data: &mut [u8], dword: impl Fn(u64) -> u32) {
    if offset % 4 == 0 && data.len() % 4 == 0 {
        for (n, data) in (0..).zip(data.chunks_exact_mut(4)) {
            data.copy_from_slice(&dword(offset.saturating_add(4 * n)).to_le_bytes());
        }
        return;
    }
    match Access::decode(offset & 3, data.len()) {
        Some(access) => access.extract(dword(offset & !3), data),
        None => data.fill(0xff),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BarKind;

    const CONTROL: Dword = Dword::containing(0);
    const BAR: BarIndex = BarIndex::ALL[4];
    const SHAPE: MsixShape = MsixShape { vectors: 3, table: (BAR, 0), pba: (BAR, 0x800) };

    /// 4 KiB in BAR 4, and 128 bytes in BAR 0.
    fn bars() -> BarSet {
        let large = BarKind::Memory64 { size: 0x1000, prefetchable: true };
        BarSet::new(&[(BAR, large), (BarIndex::ALL[0], BarKind::Memory32 { size: 128 })]).unwrap()
    }

    fn msix() -> Msix {
        Msix::new(SHAPE, &bars()).unwrap()
    }

    fn enable(msix: &mut Msix, control: u16) -> Effects {
        msix.write(CONTROL, DwordWrite::new(u32::from(control) << 16, 0b1100))
    }

    #[test]
    fn the_capability_names_its_table() {
        let mut msix = msix();
        assert_eq!(msix.read(CONTROL), 0x0002_0011);
        let _ = msix.write(CONTROL, DwordWrite::full(u32::MAX));
        assert_eq!(msix.read(CONTROL), 0xc002_0011);
        assert_eq!(msix.read(Dword::containing(4)), 4);
        assert_eq!(msix.read(Dword::containing(8)), 0x804);
    }

    #[test]
    fn a_message_needs_enable_and_no_mask() {
        let mut msix = msix();
        let _ = msix.table_write(16, &[0x03, 0, 0xe0, 0xfe, 1, 0, 0, 0]);
        let _ = msix.table_write(24, &[0x41, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(msix.message(1), None);
        assert!(enable(&mut msix, 0xc000).messages);
        assert_eq!(msix.message(1), None);
        assert!(enable(&mut msix, 0x8000).messages);
        assert_eq!(msix.message(1), Some((0x1_fee0_0000, 0x41)));
        assert_eq!(msix.message(0), None);
        assert!(msix.table_write(28, &[1, 0, 0, 0]).messages);
        assert_eq!(msix.message(1), None);
        msix.reset();
        assert_eq!(msix, self::msix());
    }

    #[test]
    fn entries_written_under_the_function_mask_have_no_effect_yet() {
        let mut msix = msix();
        let _ = enable(&mut msix, 0xc000);
        assert!(msix.table_write(0, &[1; 8]).is_none());
        assert!(enable(&mut msix, 0xc000).is_none());
    }

    #[test]
    fn an_entry_holds_an_aligned_address_and_one_mask_bit() {
        let mut msix = msix();
        assert!(!msix.enabled());
        let _ = enable(&mut msix, 0x8000);
        assert!(msix.enabled());
        assert!(msix.table_write(0, &[0xff; 8]).messages);
        let _ = msix.table_write(8, &[0xff; 8]);
        let mut entry = [0; 16];
        msix.table_read(0, &mut entry);
        assert_eq!(entry, [0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0]);
        let mut behind = [0xaa; 4];
        msix.table_read(3 * 16, &mut behind);
        assert_eq!(behind, [0; 4], "there are three vectors");
        assert_eq!(msix.read(Dword::containing(12)), 0);
    }

    #[test]
    fn odd_table_accesses_are_harmless() {
        let mut msix = msix();
        for len in [0, 1, 2, 3, 4, 5, 8, 12, 16] {
            for offset in [0, 1, 2, 4, 8, 40, 44, 47, 48, 0x7fc, u64::MAX - 7, u64::MAX] {
                let effects = msix.table_write(offset, &vec![0xff; len]);
                let whole = matches!(len, 4 | 8) && offset % 4 == 0;
                let refused = (!whole).then_some(Refused::MsixTable { offset, len });
                assert_eq!((effects.is_none(), effects.refused), (true, refused));
                msix.table_read(offset, &mut vec![0; len]);
                msix.pba_read(offset, &mut vec![0; len], |_| true);
            }
        }
    }

    #[test]
    fn a_qword_is_two_dwords_at_any_multiple_of_4() {
        let (mut qword, mut dwords) = (msix(), msix());
        assert_eq!(qword.table_write(20, &[1, 2, 3, 4, 5, 6, 7, 8]).refused, None);
        let _ = dwords.table_write(20, &[1, 2, 3, 4]);
        let _ = dwords.table_write(24, &[5, 6, 7, 8]);
        assert_eq!(qword, dwords);
        assert_ne!(qword, msix());
    }

    #[test]
    fn pending_bits_are_those_of_the_vectors() {
        let mut data = [0; 8];
        msix().pba_read(0, &mut data, |vector| vector != 1);
        assert_eq!(data, [0b101, 0, 0, 0, 0, 0, 0, 0]);
        let mut byte = [0];
        msix().pba_read(0, &mut byte, |_| true);
        assert_eq!(byte, [0b111]);
    }

    #[test]
    fn a_bar_access_reaches_the_table_the_pba_or_neither() {
        let (mut msix, mut data) = (msix(), [0; 8]);
        assert_eq!(msix.bar_write(BAR, 24, &[9, 0, 0, 0, 0, 0, 0, 0]), Some(Effects::NONE));
        assert!(msix.bar_read(BAR, 24, &mut data, true, |_| false));
        assert_eq!(data, [9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(msix.bar_write(BAR, 0x800, &[0xff; 8]), Some(Effects::NONE));
        assert!(msix.bar_read(BAR, 0x800, &mut data, true, |vector| vector == 2));
        assert_eq!(data, [0b100, 0, 0, 0, 0, 0, 0, 0]);
        for (bar, offset) in [(BAR, 0x30), (BAR, 0x808), (BarIndex::ALL[0], 0)] {
            assert_eq!(msix.bar_write(bar, offset, &[0xff; 4]), None);
            assert!(!msix.bar_read(bar, offset, &mut data, true, |_| true));
            assert_eq!(data, [0b100, 0, 0, 0, 0, 0, 0, 0], "unchanged");
        }
    }

    #[test]
    fn a_vector_that_can_be_sent_does_not_read_as_pending() {
        let mut msix = msix();
        let pending = |msix: &Msix, may_send| {
            let mut byte = [0];
            assert!(msix.bar_read(BAR, 0x800, &mut byte, may_send, |vector| vector < 2));
            byte[0]
        };
        let _ = enable(&mut msix, 0x8000);
        assert_eq!(pending(&msix, true), 0b11);
        let _ = msix.table_write(28, &[0; 4]);
        assert_eq!((pending(&msix, true), pending(&msix, false)), (0b01, 0b11));
        let _ = enable(&mut msix, 0xc000);
        assert_eq!(pending(&msix, true), 0b11, "Function Mask");
    }
}
