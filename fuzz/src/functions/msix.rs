//! MSI-X: the capability, the table and the pending bits, compared with a table of plain numbers.
//!
//! The first byte chooses the number of vectors. After each access, every vector's message must follow from the table
//! and the masks, and no message may change without an effect that reports it.

use pci::{BarIndex, BarKind, BarSet, Dword, DwordWrite, Msix, MsixShape};

use crate::input::{Input, Seed};

const VECTORS: [u16; 8] = [1, 2, 4, 5, 33, 64, 65, 2048];
const PBA: u64 = 0x8000;

// The kinds of operation.
const CONFIG: u8 = 0;
const TABLE_WRITE: u8 = 1;
const TABLE_READ: u8 = 2;
const PBA_READ: u8 = 3;
const RESET: u8 = 4;
const BAR_ACCESS: u8 = 5;
const KINDS: u8 = 6;

const ENABLE: u16 = 0x8000;
const FUNCTION_MASK: u16 = 0x4000;

/// The registers, and the table as bytes.
struct Table {
    control: u16,
    bytes: Vec<u8>,
}

impl Table {
    fn new(vectors: u16) -> Self {
        let entry = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
        Self { control: 0, bytes: entry.repeat(vectors.into()) }
    }

    fn vectors(&self) -> u16 {
        (self.bytes.len() / 16) as u16
    }

    fn dword(&self, vector: u16, n: usize) -> u32 {
        let at = usize::from(vector) * 16 + n * 4;
        self.bytes.get(at..at + 4).map_or(0, |bytes| u32::from_le_bytes(bytes.try_into().unwrap()))
    }

    fn message(&self, vector: u16) -> Option<(u64, u32)> {
        let sends = self.control & ENABLE != 0 && self.control & FUNCTION_MASK == 0;
        (vector < self.vectors() && sends && self.dword(vector, 3) & 1 == 0)
            .then(|| (u64::from(self.dword(vector, 1)) << 32 | u64::from(self.dword(vector, 0)), self.dword(vector, 2)))
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if !(data.len() == 4 || data.len() == 8) || !offset.is_multiple_of(4) {
            return;
        }
        for (offset, byte) in (u128::from(offset)..).zip(data) {
            let writable = match offset % 16 {
                0 => 0xfc,
                12 => 1,
                13.. => 0,
                _ => 0xff,
            };
            if let Some(place) = usize::try_from(offset).ok().and_then(|offset| self.bytes.get_mut(offset)) {
                *place = byte & writable;
            }
        }
    }

    /// The vectors to compare: all of a small table, or a sample.
    fn sample(&self, offset: u64) -> impl Iterator<Item = u16> + use<> {
        let vectors = self.vectors();
        let touched = (offset / 16).min(0xfff0) as u16;
        (0..vectors.min(66)).chain([touched, touched + 1, vectors - 1, vectors, u16::MAX])
    }
}

/// Expected result of a read of `len` bytes at `offset`: bytes within a dword, whole dwords, or all-ones.
fn expected_read(bytes: &[u8], offset: u64, len: usize) -> Vec<u8> {
    let dwords = offset.is_multiple_of(4) && len.is_multiple_of(4);
    let within = matches!(len, 1 | 2) && offset.is_multiple_of(len as u64);
    if !dwords && !within {
        return vec![0xff; len];
    }
    let byte = |offset: u128| usize::try_from(offset).ok().and_then(|offset| bytes.get(offset)).copied().unwrap_or(0);
    (u128::from(offset)..).take(len).map(byte).collect()
}

/// An offset in the table or just outside it, or anywhere.
fn offset(input: &mut Input<'_>) -> u64 {
    let offset = input.u16();
    if offset & 0x8000 == 0 { u64::from(offset) } else { u64::from(offset) << 48 | u64::from(input.u32()) }
}

fn apply(msix: &mut Msix, table: &mut Table, input: &mut Input<'_>) {
    let mut data = [0; 16];
    match input.u8() % KINDS {
        CONFIG => {
            let [dword, enables] = input.array();
            let value = input.u32();
            let before: Vec<_> = table.sample(0).map(|vector| table.message(vector)).collect();
            let effects = msix.write(Dword::containing(u16::from(dword % 4) * 4), DwordWrite::new(value, enables));
            if dword % 4 == 0 {
                let [low, high] = table.control.to_le_bytes();
                let [_, _, new_low, new_high] = value.to_le_bytes();
                let low = if enables & 4 != 0 { new_low } else { low };
                let high = if enables & 8 != 0 { new_high } else { high };
                table.control = u16::from_le_bytes([low, high]) & (ENABLE | FUNCTION_MASK);
            }
            let after: Vec<_> = table.sample(0).map(|vector| table.message(vector)).collect();
            assert!(effects.messages || before == after, "messages change without an effect");
            compare(msix, table, 0);
        }
        TABLE_WRITE => {
            let (offset, len) = (offset(input), usize::from(input.u8() % 17));
            data[..8].copy_from_slice(&input.array::<8>());
            let before: Vec<_> = table.sample(offset).map(|vector| table.message(vector)).collect();
            let effects = msix.table_write(offset, &data[..len]);
            table.write(offset, &data[..len]);
            let after: Vec<_> = table.sample(offset).map(|vector| table.message(vector)).collect();
            assert!(effects.messages || before == after, "messages change without an effect");
            compare(msix, table, offset);
        }
        TABLE_READ => {
            let (offset, len) = (offset(input), usize::from(input.u8() % 17));
            msix.table_read(offset, &mut data[..len]);
            assert_eq!(data[..len], expected_read(&table.bytes, offset, len), "{len} bytes at {offset:#x}");
        }
        PBA_READ => {
            let (offset, len, key) = (offset(input), usize::from(input.u8() % 17), input.u8());
            let pending = |vector: u16| (vector as u8).wrapping_mul(37).wrapping_add(key) & 4 != 0;
            msix.pba_read(offset, &mut data[..len], pending);
            let bits = |first: u16| {
                (0..8).filter(|n| first + n < table.vectors() && pending(first + n)).fold(0, |bits, n| bits | 1 << n)
            };
            let bytes: Vec<u8> = (0..table.vectors()).step_by(8).map(bits).collect();
            assert_eq!(data[..len], expected_read(&bytes, offset, len), "{len} bytes at {offset:#x}");
        }
        BAR_ACCESS => bar_access(msix, table, input),
        RESET => {
            msix.reset();
            *table = Table::new(table.vectors());
            compare(msix, table, 0);
        }
        _ => {}
    }
}

/// Reads and writes by a BAR: the table, the pending bits without those that can be sent, or neither.
fn bar_access(msix: &mut Msix, table: &mut Table, input: &mut Input<'_>) {
    let ([choice, len, key], offset) = (input.array(), u64::from(input.u16()));
    let (bar, may_send, len) = (BarIndex::ALL[usize::from(choice % 6)], choice & 0x80 != 0, usize::from(len % 17));
    let raised = |vector: u16| (vector as u8).wrapping_mul(37).wrapping_add(key) & 4 != 0;
    let bits = |first: u16| {
        let pending = |vector| raised(vector) && !(may_send && table.message(vector).is_some());
        (0..8).filter(|n| first + n < table.vectors() && pending(first + n)).fold(0, |bits, n| bits | 1 << n)
    };
    let mut pba: Vec<u8> = (0..table.vectors()).step_by(8).map(bits).collect();
    pba.resize(pba.len().next_multiple_of(8), 0);
    let expected = match offset.checked_sub(PBA) {
        _ if bar != BarIndex::ALL[4] => None,
        Some(inner) if inner < pba.len() as u64 => Some(expected_read(&pba, inner, len)),
        None if offset < table.bytes.len() as u64 => Some(expected_read(&table.bytes, offset, len)),
        _ => None,
    };
    let mut data = [0x5a; 16];
    assert_eq!(msix.bar_read(bar, offset, &mut data[..len], may_send, raised), expected.is_some());
    assert_eq!(data[..len], expected.clone().unwrap_or_else(|| vec![0x5a; len]), "{len} bytes at {offset:#x}");
    data = [key; 16];
    assert_eq!(msix.bar_write(bar, offset, &data[..len]).is_some(), expected.is_some());
    if expected.is_some() && offset < PBA {
        table.write(offset, &data[..len]);
    }
    compare(msix, table, offset);
}

fn compare(msix: &Msix, table: &Table, touched: u64) {
    for vector in table.sample(touched) {
        assert_eq!(msix.message(vector), table.message(vector), "vector {vector}, control {:#x}", table.control);
    }
    let control = u32::from(table.control | (table.vectors() - 1));
    for (offset, expected) in [(0, control << 16 | 0x11), (4, 4), (8, PBA as u32 | 4), (12, 0)] {
        assert_eq!(msix.read(Dword::containing(offset)), expected);
    }
    assert_eq!(msix.enabled(), table.control & ENABLE != 0);
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

fn run_to_end(input: &[u8]) -> Msix {
    let mut input = Input::new(input);
    let vectors = VECTORS[usize::from(input.u8()) % VECTORS.len()];
    let bar = BarIndex::ALL[4];
    let bars = BarSet::new(&[(bar, BarKind::Memory64 { size: 2 * PBA, prefetchable: true })]).unwrap();
    let mut msix = Msix::new(MsixShape { vectors, table: (bar, 0), pba: (bar, PBA) }, &bars).unwrap();
    let mut table = Table::new(vectors);
    compare(&msix, &table, 0);
    while !input.is_empty() {
        apply(&mut msix, &mut table, &mut input);
    }
    // Compare the whole table, byte by byte.
    let mut bytes = vec![0; table.bytes.len()];
    msix.table_read(0, &mut bytes);
    assert_eq!(bytes, table.bytes);
    msix
}

fn control(seed: Seed, value: u16) -> Seed {
    seed.with([CONFIG, 0, 0b1100, 0, 0]).with(value.to_le_bytes())
}

fn entry(seed: Seed, vector: u16, offset: u16, value: u64, len: u8) -> Seed {
    seed.with([TABLE_WRITE]).with((vector * 16 + offset).to_le_bytes()).with([len]).with(value.to_le_bytes())
}

/// Operations of Linux: set MSI-X Enable and Function Mask, fill and unmask each vector, clear Function Mask.
fn linux(choice: u8, vectors: u16) -> Seed {
    let seed = control(Seed::new().with([choice]), ENABLE | FUNCTION_MASK);
    let seed = (0..vectors).fold(seed, |seed, vector| {
        let seed = entry(seed, vector, 0, 0xfee0_0000, 4);
        let seed = entry(entry(seed, vector, 4, 0, 4), vector, 8, 0x4000 + u64::from(vector), 4);
        entry(seed, vector, 12, 0, 4)
    });
    control(seed, ENABLE)
}

/// Seeds: the accesses of Linux, masking and unmasking, accesses of 8 bytes, and pending bits.
pub fn seeds() -> Vec<Vec<u8>> {
    let masked = entry(entry(linux(2, 4), 1, 12, 1, 4), 1, 12, 0, 4);
    let wide = entry(entry(control(Seed::new().with([4]), ENABLE), 32, 0, 0xfee0_1000, 8), 32, 8, 0x41, 8);
    let pending = Seed::new().with([6, PBA_READ, 8, 0, 4, 0x55, PBA_READ, 0, 0, 1, 0xaa]);
    // The pending bits of a function that may send and of one that may not; the table; another BAR.
    let by_bar = linux(2, 4).with([BAR_ACCESS, 0x82, 8, 4, 0, 0x80, BAR_ACCESS, 4, 8, 4, 0, 0x80]);
    let by_bar = by_bar.with([BAR_ACCESS, 4, 4, 1, 12, 0, BAR_ACCESS, 0, 4, 0, 0, 0]);
    let far = Seed::new().with([0, TABLE_READ, 0xff, 0xff]).with(u32::MAX.to_le_bytes()).with([4]);
    let reset = linux(7, 16).with([RESET]);
    [linux(0, 1), masked, wide, pending, far, reset, by_bar].map(Seed::done).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_of_linux_ends_with_messages_that_can_be_sent() {
        let messages = |n: usize| {
            let msix = run_to_end(&seeds()[n]);
            (0..msix.vectors()).filter_map(|vector| msix.message(vector)).count()
        };
        assert_eq!([0, 1, 2, 5].map(messages), [1, 4, 1, 0]);
    }
}
