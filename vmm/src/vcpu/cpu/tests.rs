//! vCPUs on the machine's own /dev/kvm, without firmware or devices.

use std::time::Duration;

use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend};

use super::*;
use crate::acpi::ged::GenericEventDevice;
use crate::arch::x86_64::layout::{self, Layout};
use crate::arch::x86_64::regs::Entry;
use crate::config::MemoryConfig;
use crate::vm::memory::GuestRam;

/// MMIO handler that panics on each access.
struct Broken;

impl MmioHandler for Broken {
    fn read(&self, _: u64, _: &mut [u8]) {
        panic!("on purpose");
    }

    fn write(&self, _: u64, _: &[u8]) {}
}

/// A VM of 2 MiB with a vCPU that will run `code`.
fn vcpu(code: &[u8]) -> (GuestRam, Vcpu) {
    let config = MemoryConfig { size: 2 << 20, ..MemoryConfig::default() };
    let ram = GuestRam::new(&config, &Layout::new(config.size, 0, 46).unwrap(), false).unwrap();
    let vm = crate::kvm::Kvm::open().unwrap().create_vm(layout::KVM_TSS).unwrap();
    let memory = ram.memory().memory();
    memory.write_slice(code, GuestAddress(0x1000)).unwrap();
    // SAFETY: the memory is returned together with the vCPU, and lasts for as long as the tests use that.
    unsafe { vm.set_memory(0, 0, memory.get_host_address(GuestAddress(0)).unwrap(), config.size) }.unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut sregs = vcpu.sregs().unwrap();
    Entry::Pvh(0x1000).set_sregs(&mut sregs);
    vcpu.set_sregs(&sregs).unwrap();
    vcpu.set_regs(&Entry::Pvh(0x1000).regs()).unwrap();
    (ram, vcpu)
}

#[test]
fn a_panic_of_a_vcpus_thread_ends_the_guest() {
    // mov eax, [0xd0000000]
    let (_ram, vcpu) = vcpu(&[0xa1, 0x00, 0x00, 0x00, 0xd0]);
    let stop = Arc::new(StopSignal::new().unwrap());
    let ports = IoPorts::new(None, Arc::new(GenericEventDevice::new(Arc::clone(stop.event())).unwrap()));
    let handlers = Arc::new(ExitHandlers { mmio: Arc::new(Broken), ports, stop: Arc::clone(&stop) });
    let _vcpus = Vcpus::start(vec![vcpu], &handlers, &Arc::default()).unwrap();
    let stopped = std::iter::repeat_with(|| {
        std::thread::sleep(Duration::from_millis(1));
        stop.take()
    });
    let reason = stopped.take(60_000).flatten().next().unwrap();
    assert!(matches!(reason, Stop::Failed(VcpuError::Panicked(0))), "{reason:?}");
}

#[test]
fn a_paused_guest_does_not_run_until_it_is_resumed() {
    // again: inc dword [0x2000]; jmp again
    let (ram, vcpu) = vcpu(&[0xff, 0x05, 0x00, 0x20, 0x00, 0x00, 0xeb, 0xf8]);
    let stop = Arc::new(StopSignal::new().unwrap());
    let ports = IoPorts::new(None, Arc::new(GenericEventDevice::new(Arc::clone(stop.event())).unwrap()));
    let handlers = Arc::new(ExitHandlers { mmio: Arc::new(Broken), ports, stop });
    let count = || ram.memory().memory().read_obj::<u32>(GuestAddress(0x2000)).unwrap();
    let moves_on_from = |before| {
        std::iter::repeat_with(|| {
            std::thread::sleep(Duration::from_millis(1));
            count()
        })
        .take(60_000)
        .any(|now| now != before)
    };
    let vcpus = Vcpus::start(vec![vcpu], &handlers, &Arc::default()).unwrap();
    for _ in 0..5 {
        assert!(moves_on_from(count()));
        vcpus.pause();
        let before = count();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(count(), before);
        vcpus.resume();
    }
}

#[test]
fn a_vcpu_that_was_removed_does_not_run_and_can_be_added_again() {
    // again: inc dword [0x2000]; jmp again
    let (ram, vcpu) = vcpu(&[0xff, 0x05, 0x00, 0x20, 0x00, 0x00, 0xeb, 0xf8]);
    let stop = Arc::new(StopSignal::new().unwrap());
    let ports = IoPorts::new(None, Arc::new(GenericEventDevice::new(Arc::clone(stop.event())).unwrap()));
    let handlers = Arc::new(ExitHandlers { mmio: Arc::new(Broken), ports, stop });
    let count = || ram.memory().memory().read_obj::<u32>(GuestAddress(0x2000)).unwrap();
    let stands_still = || {
        let before = count();
        std::thread::sleep(Duration::from_millis(20));
        count() == before
    };
    let mut vcpus = Vcpus::start(vec![vcpu], &handlers, &Arc::default()).unwrap();
    for paused in [false, true, false] {
        let before = count();
        while count() == before && !paused {
            std::thread::sleep(Duration::from_millis(1));
        }
        if paused {
            vcpus.pause();
        }
        vcpus.remove(0);
        assert!(vcpus.has(0) && stands_still());
        // A removed vCPU is not waited for.
        vcpus.pause();
        vcpus.resume();
        vcpus.nmi();
        vcpus.spawn(0).unwrap();
    }
    let before = count();
    while count() == before {
        std::thread::sleep(Duration::from_millis(1));
    }
    vcpus.remove(0);
    // The vCPU waits for a SIPI.
    vcpus.add(0).unwrap();
    assert!(stands_still());
    vcpus.pause();
    assert!(vcpus.add(7).is_err() && !vcpus.has(7));
}

#[test]
fn the_first_stop_is_reported_once() {
    let signal = StopSignal::new().unwrap();
    assert!(signal.take().is_none());
    signal.send(Stop::PowerOff);
    signal.send(Stop::Reset);
    assert!(matches!(signal.take(), Some(Stop::PowerOff)));
    assert!(signal.take().is_none());
    assert!(signal.event().read().is_err());
    signal.send(Stop::Reset);
    assert!(matches!(signal.take(), Some(Stop::Reset)));
}
