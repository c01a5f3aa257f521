use std::sync::atomic::AtomicBool;

use super::super::IommuCounters;
use super::super::endpoint::Common;
use super::super::fault::Faults;
use super::*;
use crate::memory::Translate;

const ENDPOINT: u32 = 0x108;
const OTHER: u32 = 0x109;

/// Finishes a change of endpoints without followers.
fn finish(change: Change) {
    let (told, passes) = change.tell();
    assert_eq!(told, Ok(()));
    passes.wait();
}

fn table() -> Table {
    let counters = Arc::new(IommuCounters::new());
    let common = Arc::new(Common {
        order: parking_lot::Mutex::default(),
        bypass: AtomicBool::new(false),
        faults: Faults::default(),
        counters,
    });
    let mut table = Table::new((1 << 48) - 1);
    for id in [ENDPOINT, OTHER] {
        finish(table.add(Arc::new(Endpoint::new(id, Arc::clone(&common)))));
    }
    table
}

fn carry_out(table: &mut Table, request: Request) -> Result<(), Status> {
    finish(table.carry_out(request)?);
    Ok(())
}

fn attach(table: &mut Table, domain: u32, endpoint: u32, bypass: bool) -> Result<(), Status> {
    carry_out(table, Request::Attach { domain, endpoint, bypass })
}

fn map(table: &mut Table, domain: u32, first: u64, last: u64, target: u64) -> Result<(), Status> {
    let access = Permissions::ReadWrite;
    carry_out(table, Request::Map { domain, range: Range { first, last }, target, access })
}

fn unmap(table: &mut Table, domain: u32, first: u64, last: u64) -> Result<(), Status> {
    carry_out(table, Request::Unmap { domain, range: Range { first, last } })
}

fn at(table: &Table, endpoint: u32, address: u64) -> Option<u64> {
    Some(table.endpoint(endpoint).unwrap().translate(address, 1, Permissions::Read)?.0)
}

#[test]
fn a_missing_domain_or_endpoint_has_no_entry() {
    let mut table = table();
    assert_eq!(attach(&mut table, 0, 0x107, false), Err(Status::NoEntry));
    assert_eq!(carry_out(&mut table, Request::Detach { domain: 0, endpoint: 0x107 }), Err(Status::NoEntry));
    assert_eq!(carry_out(&mut table, Request::Probe { endpoint: 0x107 }), Err(Status::NoEntry));
    assert_eq!(carry_out(&mut table, Request::Probe { endpoint: OTHER }), Ok(()));
    assert_eq!(map(&mut table, 0, 0, 0xfff, 0), Err(Status::NoEntry));
    assert_eq!(unmap(&mut table, 0, 0, 0xfff), Err(Status::NoEntry));
    assert_eq!(carry_out(&mut table, Request::Detach { domain: 0, endpoint: ENDPOINT }), Err(Status::Invalid));
}

#[test]
fn a_domain_ends_when_its_last_endpoint_attaches_elsewhere() {
    let mut table = table();
    for endpoint in [ENDPOINT, OTHER] {
        attach(&mut table, 1, endpoint, false).unwrap();
    }
    map(&mut table, 1, 0x1000, 0x1fff, 0x8000).unwrap();
    attach(&mut table, 2, ENDPOINT, false).unwrap();
    assert_eq!((at(&table, ENDPOINT, 0x1000), at(&table, OTHER, 0x1010)), (None, Some(0x8010)));
    attach(&mut table, 2, OTHER, false).unwrap();
    assert_eq!(table.counts(), (1, 0));
    attach(&mut table, 1, OTHER, false).unwrap();
    assert_eq!(at(&table, OTHER, 0x1000), None);
}

#[test]
fn a_domain_is_of_one_kind_as_long_as_it_lives() {
    let mut table = table();
    attach(&mut table, 1, ENDPOINT, true).unwrap();
    assert_eq!(at(&table, ENDPOINT, 0xffff_f000), Some(0xffff_f000));
    assert_eq!(attach(&mut table, 1, OTHER, false), Err(Status::Invalid));
    assert_eq!(map(&mut table, 1, 0, 0xfff, 0), Err(Status::Invalid));
    assert_eq!(unmap(&mut table, 1, 0, 0xfff), Err(Status::Invalid));
    carry_out(&mut table, Request::Detach { domain: 1, endpoint: ENDPOINT }).unwrap();
    assert_eq!(at(&table, ENDPOINT, 0), None);
    assert_eq!(attach(&mut table, 1, OTHER, false), Ok(()));
    assert_eq!(attach(&mut table, LAST_DOMAIN + 1, OTHER, false), Err(Status::Range));
}

#[test]
fn a_mapping_is_aligned_and_in_range_and_overlaps_no_other() {
    let mut table = table();
    attach(&mut table, 1, ENDPOINT, false).unwrap();
    for (first, last, target) in [(1, 0xfff, 0), (0, 0xffe, 0), (0, 0xfff, 1), (0x1000, 1 << 48, 0)] {
        assert_eq!(map(&mut table, 1, first, last, target), Err(Status::Range), "{first:#x} {last:#x} {target:#x}");
    }
    assert_eq!(map(&mut table, 1, 0, 0x1fff, u64::MAX - 0xfff), Err(Status::Range), "there is no such target");
    map(&mut table, 1, 0x1000, 0x2fff, 0).unwrap();
    assert_eq!(map(&mut table, 1, 0x2000, 0x3fff, 0), Err(Status::Invalid));
    assert_eq!(unmap(&mut table, 1, 0x2000, 0x2fff), Err(Status::Range));
    assert_eq!(unmap(&mut table, 1, 0x3000, 0x3fff), Ok(()), "of nothing");
    assert_eq!(unmap(&mut table, 1, 0, u64::MAX), Ok(()));
    assert_eq!(table.counts(), (1, 0));
}

#[test]
fn a_guest_cannot_have_more_mappings_than_there_can_be() {
    let mut table = table().with_most_mappings(2);
    attach(&mut table, 1, ENDPOINT, false).unwrap();
    attach(&mut table, 2, OTHER, false).unwrap();
    map(&mut table, 1, 0, 0xfff, 0).unwrap();
    map(&mut table, 2, 0, 0xfff, 0).unwrap();
    assert_eq!(map(&mut table, 1, 0x1000, 0x1fff, 0), Err(Status::NoMemory));
    carry_out(&mut table, Request::Detach { domain: 2, endpoint: OTHER }).unwrap();
    assert_eq!(map(&mut table, 1, 0x1000, 0x1fff, 0), Ok(()));
}

#[test]
fn a_reset_or_a_removed_endpoint_leaves_nothing_mapped() {
    let mut table = table();
    attach(&mut table, 1, ENDPOINT, false).unwrap();
    map(&mut table, 1, 0, 0xfff, 0).unwrap();
    let endpoint = Arc::clone(table.endpoint(ENDPOINT).unwrap());
    finish(table.remove(ENDPOINT));
    assert_eq!((table.counts(), endpoint.translate(0, 1, Permissions::Read)), ((0, 0), None));
    attach(&mut table, 1, OTHER, false).unwrap();
    map(&mut table, 1, 0, 0xfff, 0).unwrap();
    finish(table.reset());
    assert_eq!((table.counts(), at(&table, OTHER, 0)), ((0, 0), None));
}
