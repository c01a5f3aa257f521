//! A NIC with short names for dword accesses, and registers by which drivers set it up.
#![allow(dead_code, reason = "each test uses some of it")]
#![allow(unreachable_pub, reason = "each test is a crate of its own")]

use x550::{Effects, Mac, Nic, Place};

pub const MAC: Mac = Mac([0x52, 0x54, 0, 1, 2, 3]);
pub const PF: Place = Place::Pf;

/// A NIC whose PF driver ended its reset, with 4 VFs in 32 pools of 4 queues.
pub fn nic() -> Nic {
    let mut nic = Nic::new(MAC);
    let _ = nic.set_num_vfs(4);
    write(&mut nic, PF, 0x18, 1 << 14);
    write(&mut nic, PF, 0x11050, 2);
    write(&mut nic, PF, 0x51b0, 1);
    nic
}

pub fn read(nic: &mut Nic, place: Place, offset: u64) -> u32 {
    let mut data = [0; 4];
    let peeked = peek(nic, place, offset);
    nic.read(place, offset, &mut data);
    assert_eq!(u32::from_le_bytes(data), peeked, "peek agrees at {offset:#x}");
    peeked
}

pub fn peek(nic: &Nic, place: Place, offset: u64) -> u32 {
    let mut data = [0; 4];
    nic.peek(place, offset, &mut data);
    u32::from_le_bytes(data)
}

pub fn effects(nic: &mut Nic, place: Place, offset: u64, value: u32) -> Effects {
    nic.write(place, offset, &value.to_le_bytes())
}

pub fn write(nic: &mut Nic, place: Place, offset: u64, value: u32) {
    let _ = effects(nic, place, offset, value);
}

/// Writes a register, and reads it.
pub fn stored(nic: &mut Nic, place: Place, offset: u64, value: u32) -> u32 {
    write(nic, place, offset, value);
    read(nic, place, offset)
}

/// The vectors that a write sends.
pub fn sent(nic: &mut Nic, place: Place, offset: u64, value: u32) -> Vec<(Place, u64)> {
    effects(nic, place, offset, value).vectors
}
