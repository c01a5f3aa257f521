#!/bin/sh
# QEMU under the command line of cloud-hypervisor, as far as the measurements of `cargo xtask bench` use it: a PF with VFs, over taps,
# on a bus below a root port, also behind an IOMMU; or an igb for a PF with a switch; or a vsock device, whose connections the kernel
# carries; or a shared folder; or a device of the host. What it has not been taught it refuses.

root=${0%/*}/qemu
kernel= initramfs= cmdline= memory= pf= vfs= vsock= fs= device= iommu= irqchip=on behind=

value_of() { # KEY of LIST, which is key=value,key=value
    echo "$2" | tr , '\n' | sed -n "s/^$1=//p"
}

tap() { # ID LIST: a tap as a netdev
    echo "tap,id=$1,ifname=$(value_of tap "$2"),script=no,downscript=no,vhost=$([ "$(value_of vhost "$2")" = on ] && echo on || echo off)"
}

while [ $# -gt 0 ]; do
    case $1 in
    --kernel) kernel=${2%/*}/bzImage ;;
    --initramfs) initramfs=$2 ;;
    --cmdline) cmdline=$2 ;;
    --memory) memory=$(value_of size "$2") ;;
    --net) pf=$2 ;;
    --net-vf) vfs="$vfs $2" ;;
    --vsock) vsock=$2 ;;
    --fs) fs=$2 ;;
    --device) device=$(value_of path "$2") ;;
    --platform) iommu=$(value_of iommu "$2") ;;
    --serial | --console | --cpus | --api-socket) ;;
    *) echo "qemu.sh: $1 is not known" >&2; exit 1 ;;
    esac
    shift 2
done

set --
# An IOMMU comes before what is behind it.
case $iommu in
'') ;;
on) set -- -device virtio-iommu-pci; behind=,iommu_platform=on ;;
intel) set -- -device intel-iommu; behind=,iommu_platform=on irqchip=split ;;
*) echo "qemu.sh: --platform iommu=$iommu is not known" >&2; exit 1 ;;
esac
if [ -n "$pf" ]; then
    set -- "$@" -device pcie-root-port,id=rp0,chassis=1,slot=1
    if [ -n "$(value_of switch "$pf")" ]; then
        set -- "$@" -device igb,bus=rp0,addr=0x0.0,mac="$(value_of mac "$pf")",romfile=
    else
        function=0
        for vf in $vfs; do
            function=$((function + 1))
            set -- "$@" -netdev "$(tap "vf$function" "$vf")" -device \
                virtio-net-pci,bus=rp0,addr=0x0.$function,netdev=vf$function,mac="$(value_of mac "$vf")",sriov-pf=pf,romfile=$behind
        done
        set -- "$@" -netdev "$(tap pf "$pf")" \
            -device virtio-net-pci,bus=rp0,addr=0x0.0,netdev=pf,mac="$(value_of mac "$pf")",id=pf,romfile=$behind
    fi
fi
if [ -n "$device" ]; then
    set -- "$@" -device vfio-pci,host="${device##*/}"
fi
if [ -n "$vsock" ]; then
    set -- "$@" -device vhost-vsock-pci,guest-cid="$(value_of cid "$vsock")"
fi
if [ -n "$fs" ]; then
    # The size of the queue is cloud-hypervisor's default.
    set -- "$@" -object memory-backend-memfd,id=ram,size="$memory",share=on -machine memory-backend=ram \
        -chardev socket,id=fs,path="$(value_of socket "$fs")" \
        -device vhost-user-fs-pci,chardev=fs,tag="$(value_of tag "$fs")",queue-size=1024
fi

exec "$root/lib/ld-linux-x86-64.so.2" --library-path "$root/lib" "$root/qemu-system-x86_64" -L "$root/share" \
    -machine q35,accel=kvm,kernel-irqchip=$irqchip -cpu host -smp 1 -m "$memory" -nodefaults -display none -no-reboot -serial stdio \
    -kernel "$kernel" -initrd "$initramfs" -append "$cmdline" "$@"
