//! A device's file that was bound to an iommufd before this process got it: by this VM's last run, or by another
//! program, possibly a VMM that ended while the device was active.
//!
//! The kernel does not report which iommufd that was, and looks up address space numbers there. So the device is
//! quiesced before it is attached, and is attached to the guest's memory only after a proof that it is bound to this
//! VM's iommufd: an address space of that iommufd cannot be destroyed while a device is attached to it.

use std::io;
use std::os::fd::OwnedFd;

use pci::spec::{command, header};
use rustix::io::{pread, pwrite};
use vfio_bindings::bindings::vfio::{VFIO_DEVICE_FLAGS_RESET, VFIO_PCI_CONFIG_REGION_INDEX};

use crate::vfio::error::VfioError;
use crate::vfio::kernel::{info, ioctl, iommufd_ioctl};

/// Requests to the kernel.
trait Calls {
    /// Turns off all interrupts of the device.
    fn clear_irqs(&self);

    /// The device's Command register.
    fn command(&self) -> io::Result<u16>;

    fn set_command(&self, command: u16) -> io::Result<()>;

    /// Resets the device, if possible.
    fn reset(&self) -> io::Result<()>;

    /// Creates an address space of this VM's iommufd.
    fn alloc(&self) -> io::Result<u32>;

    /// Destroys an address space of this VM's iommufd.
    fn destroy(&self, ioas: u32) -> io::Result<()>;

    /// Attaches the device to an address space of the iommufd to which it is bound.
    fn attach(&self, ioas: u32) -> io::Result<()>;

    fn detach(&self) -> io::Result<()>;
}

/// A device's file, and this VM's iommufd.
struct Kernel<'a> {
    device: &'a OwnedFd,
    iommufd: &'a OwnedFd,
}

impl Kernel<'_> {
    /// Offset of the device's Command register in its file.
    fn command_at(&self) -> io::Result<u64> {
        let region = info::region(&ioctl::region_info(self.device, VFIO_PCI_CONFIG_REGION_INDEX)?);
        Ok(region.offset.saturating_add(header::COMMAND_STATUS.into()))
    }
}

impl Calls for Kernel<'_> {
    fn clear_irqs(&self) {
        ioctl::clear_all_irqs(self.device);
    }

    fn command(&self) -> io::Result<u16> {
        let mut bytes = [0; 2];
        match pread(self.device, &mut bytes, self.command_at()?)? {
            2 => Ok(u16::from_le_bytes(bytes)),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn set_command(&self, command: u16) -> io::Result<()> {
        match pwrite(self.device, &command.to_le_bytes(), self.command_at()?)? {
            2 => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn reset(&self) -> io::Result<()> {
        let resets = ioctl::device_info(self.device)?.flags & VFIO_DEVICE_FLAGS_RESET != 0;
        if resets { ioctl::reset(self.device) } else { Ok(()) }
    }

    fn alloc(&self) -> io::Result<u32> {
        iommufd_ioctl::alloc(self.iommufd)
    }

    fn destroy(&self, ioas: u32) -> io::Result<()> {
        iommufd_ioctl::destroy(self.iommufd, ioas)
    }

    fn attach(&self, ioas: u32) -> io::Result<()> {
        ioctl::attach(self.device, ioas)
    }

    fn detach(&self) -> io::Result<()> {
        ioctl::detach(self.device)
    }
}

/// Quiesces and detaches `device`, whose file was bound before, and checks that it is bound to `iommufd`. With
/// `has_sibling` the check is not needed: another device of its IOMMU group is attached here, and the kernel binds all
/// devices of a group to the same iommufd and allows them only one address space.
///
/// # Errors
///
/// Fails if the device is bound to another iommufd, or the kernel refuses. It is attached to nothing of this VM then.
pub(crate) fn take_over(device: &OwnedFd, iommufd: &OwnedFd, has_sibling: bool) -> Result<(), VfioError> {
    take(&Kernel { device, iommufd }, has_sibling)
}

fn take(calls: &impl Calls, has_sibling: bool) -> Result<(), VfioError> {
    quieten(calls).map_err(VfioError::of("keep the device from accessing memory"))?;
    if has_sibling { Ok(()) } else { check_bound(calls) }
}

/// Stops the device's interrupts and DMA, and resets it.
fn quieten(calls: &impl Calls) -> io::Result<()> {
    calls.clear_irqs();
    calls.set_command(calls.command()? & !command::BUS_MASTER)?;
    // Without bus mastering it accesses no memory. A failing reset is reported when the device becomes a function.
    let _ = calls.reset();
    Ok(())
}

/// Checks that the device is bound to this VM's iommufd, and leaves it detached.
fn check_bound(calls: &impl Calls) -> Result<(), VfioError> {
    let probe = calls.alloc().map_err(VfioError::of("get an address space of iommufd"))?;
    let attached = calls.attach(probe);
    // On another iommufd, the number may be that of another address space.
    let destroyed = calls.destroy(probe);
    let is_here = matches!(&destroyed, Err(error) if error.raw_os_error() == Some(libc::EBUSY));
    if attached.is_ok() {
        calls.detach().map_err(VfioError::of("take the device's address space from it"))?;
    }
    if let Err(error) = destroyed.or_else(|_| calls.destroy(probe)) {
        log::warn!("an IOMMU address space for devices of the host was not freed: {error}");
    }
    match attached {
        Ok(()) if is_here => Ok(()),
        Ok(()) => Err(VfioError::BoundElsewhere),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Err(VfioError::BoundElsewhere),
        Err(error) => Err(VfioError::of("attach the device to its address space")(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use super::*;

    /// A working device that is bound to this VM's iommufd, or to another one with address spaces of its own.
    struct Fake {
        elsewhere: Option<BTreeSet<u32>>,
        spaces: RefCell<BTreeSet<u32>>,
        attached: RefCell<Option<u32>>,
        command: RefCell<u16>,
        done: RefCell<Vec<String>>,
        refuses: Option<&'static str>,
    }

    impl Fake {
        fn new(elsewhere: Option<&[u32]>) -> Self {
            Self {
                elsewhere: elsewhere.map(|spaces| spaces.iter().copied().collect()),
                spaces: RefCell::new(BTreeSet::from([1, 2])),
                attached: RefCell::default(),
                command: RefCell::new(0x0006),
                done: RefCell::default(),
                refuses: None,
            }
        }

        fn does(&self, what: &str) -> io::Result<()> {
            self.done.borrow_mut().push(what.to_string());
            if self.refuses == Some(what) { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
        }

        fn take(&self) -> Result<(), String> {
            take(self, false).map_err(|error| error.to_string())
        }
    }

    impl Calls for Fake {
        fn clear_irqs(&self) {
            self.does("irqs").unwrap();
        }

        fn command(&self) -> io::Result<u16> {
            Ok(*self.command.borrow())
        }

        fn set_command(&self, command: u16) -> io::Result<()> {
            *self.command.borrow_mut() = command;
            self.does("command")
        }

        fn reset(&self) -> io::Result<()> {
            self.does("reset")
        }

        fn alloc(&self) -> io::Result<u32> {
            self.spaces.borrow_mut().insert(3);
            self.does("alloc").map(|()| 3)
        }

        fn destroy(&self, ioas: u32) -> io::Result<()> {
            self.does("destroy")?;
            if self.elsewhere.is_none() && *self.attached.borrow() == Some(ioas) {
                return Err(io::Error::from_raw_os_error(libc::EBUSY));
            }
            assert!(self.spaces.borrow_mut().remove(&ioas));
            Ok(())
        }

        fn attach(&self, ioas: u32) -> io::Result<()> {
            assert_eq!(*self.command.borrow() & command::BUS_MASTER, 0, "it could access memory of another VM");
            self.does("attach")?;
            let spaces = self.spaces.borrow();
            if !self.elsewhere.as_ref().unwrap_or(&spaces).contains(&ioas) {
                return Err(io::Error::from_raw_os_error(libc::ENOENT));
            }
            *self.attached.borrow_mut() = Some(ioas);
            Ok(())
        }

        fn detach(&self) -> io::Result<()> {
            *self.attached.borrow_mut() = None;
            self.does("detach")
        }
    }

    #[test]
    fn device_bound_here_is_quiesced_before_attach_and_accepted() {
        let device = Fake::new(None);
        assert_eq!(device.take(), Ok(()));
        let expected = ["irqs", "command", "reset", "alloc", "attach", "destroy", "detach", "destroy"];
        assert_eq!(*device.done.borrow(), expected);
        assert_eq!((*device.command.borrow(), *device.attached.borrow()), (0x0002, None));
        assert_eq!(*device.spaces.borrow(), BTreeSet::from([1, 2]), "nothing is left");
        let without = Fake { refuses: Some("reset"), ..Fake::new(None) };
        assert_eq!((without.take(), *without.command.borrow()), (Ok(()), 0x0002));
    }

    #[test]
    fn device_bound_to_another_iommufd_is_always_refused() {
        for elsewhere in [&[1, 2, 3][..], &[]] {
            let device = Fake::new(Some(elsewhere));
            let error = device.take().unwrap_err();
            assert!(error.starts_with("the device's file has been given to another iommufd"), "{error}");
            assert_eq!(*device.attached.borrow(), None);
            assert_eq!(*device.spaces.borrow(), BTreeSet::from([1, 2]), "nothing is left");
        }
    }

    #[test]
    fn device_of_an_attached_group_is_quiesced_and_not_reattached() {
        let device = Fake::new(None);
        take(&device, true).unwrap();
        assert_eq!(*device.done.borrow(), ["irqs", "command", "reset"]);
    }

    #[test]
    fn device_that_cannot_be_quiesced_is_not_attached() {
        let device = Fake { refuses: Some("command"), ..Fake::new(None) };
        device.take().unwrap_err();
        assert_eq!(*device.done.borrow(), ["irqs", "command"]);
    }
}
