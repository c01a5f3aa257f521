//! An emulated Intel NIC, as its drivers see it. One target has both BARs; the others have one subject each.

pub mod descriptors;
pub mod mailbox;
pub mod registers;
pub mod steering;

use x550::{Effects, Mac, Nic, Place};

/// The permanent address of the NIC.
const MAC: Mac = Mac([0x52, 0x54, 0, 1, 2, 3]);

/// Reads a dword of BAR 0.
fn read(nic: &mut Nic, place: Place, offset: u64) -> u32 {
    let mut data = [0; 4];
    nic.read(place, offset, &mut data);
    u32::from_le_bytes(data)
}

/// Reads a dword of BAR 0 without side effects.
fn peek(nic: &Nic, place: Place, offset: u64) -> u32 {
    let mut data = [0; 4];
    nic.peek(place, offset, &mut data);
    u32::from_le_bytes(data)
}

/// Writes a dword of BAR 0.
fn write(nic: &mut Nic, place: Place, offset: u64, value: u32) -> Effects {
    nic.write(place, offset, &value.to_le_bytes())
}

/// The PF for 0, and a VF otherwise: the existing ones more often than by chance.
fn place(choice: u8) -> Place {
    match choice {
        0..=127 if choice.is_multiple_of(2) => Place::Pf,
        0..=127 => Place::Vf(u16::from(choice) / 2 % 4),
        _ => Place::Vf(u16::from(choice) - 128),
    }
}

/// The choice that [`place`] reads as `place`.
fn choice(place: Place) -> u8 {
    match place {
        Place::Pf => 0,
        Place::Vf(index) => 128 + index.min(127) as u8,
    }
}
