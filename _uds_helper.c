/*
 * afxdpd's C helper; the contract is in _uds_helper.h.
 *
 * bpf(2) is called directly: the dozen commands used here need no library. Two rules hold for each call. The
 * attributes are zeroed with memset(), since an initializer clears only the first member of a union and the kernel
 * rejects stray bytes. And the size that is passed ends at the last field used, so that an old kernel does not see
 * fields that it does not know (bpf_check_uarg_tail_zero() in kernel/bpf/syscall.c).
 */

#define _GNU_SOURCE /* struct ucred, SCM_CREDENTIALS */

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/bpf.h>
#include <linux/if_link.h>

#include "_uds_helper.h"

/* For C libraries and headers that are older than the kernel we run on: Linux 5.15 headers are enough. */
#ifndef AF_XDP
#define AF_XDP 44
#endif
#ifndef SO_PREFER_BUSY_POLL
#define SO_PREFER_BUSY_POLL 69
#endif
#ifndef SO_BUSY_POLL_BUDGET
#define SO_BUSY_POLL_BUDGET 70
#endif
#ifndef BPF_F_XDP_HAS_FRAGS
#define BPF_F_XDP_HAS_FRAGS (1U << 5)
#endif

#define END_OF(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

enum {
    FLAG_END_OF_FILE = 1, /* the bits of uds_recv()'s flags */
    FLAG_CUT = 2,
    MAX_FDS = 253,        /* in one packet: SCM_MAX_FD in include/net/scm.h, unix(7) */
};

/* -- BPF objects ---------------------------------------------------------------------------------------------- */

/* The only caller of bpf(2). Every file descriptor that it returns is close-on-exec. */
static int bpf(enum bpf_cmd command, union bpf_attr *attr, size_t size)
{
    long ret = syscall(__NR_bpf, command, attr, size);
    return ret < 0 ? -errno : (int)ret;
}

/* An overlong name fills the field without a final NUL, which the kernel answers with EINVAL: nothing is cut. */
static void copy_name(char field[BPF_OBJ_NAME_LEN], const char *name)
{
    memcpy(field, name, strnlen(name, BPF_OBJ_NAME_LEN));
}

/* Maps, programs and links all answer this call, each with a structure of its own. bpf(2), BPF_OBJ_GET_INFO_BY_FD. */
static int object_info(int fd, void *info, size_t size)
{
    union bpf_attr attr;

    memset(&attr, 0, sizeof attr);
    memset(info, 0, size);
    attr.info.bpf_fd = (uint32_t)fd;
    attr.info.info_len = (uint32_t)size;
    attr.info.info = (uintptr_t)info;
    return bpf(BPF_OBJ_GET_INFO_BY_FD, &attr, END_OF(union bpf_attr, info.info));
}

int uds_xskmap_create(const char *name, unsigned int entries)
{
    union bpf_attr attr;

    memset(&attr, 0, sizeof attr);
    attr.map_type = BPF_MAP_TYPE_XSKMAP;
    attr.key_size = sizeof(uint32_t);
    attr.value_size = sizeof(uint32_t);
    attr.max_entries = entries;
    copy_name(attr.map_name, name);
    return bpf(BPF_MAP_CREATE, &attr, END_OF(union bpf_attr, map_name));
}

int uds_xskmap_query(int map_fd, unsigned int *id)
{
    struct bpf_map_info info;
    int ret = object_info(map_fd, &info, END_OF(struct bpf_map_info, max_entries));

    if (ret < 0)
        return ret;
    /* The type alone would not do: a raw tracepoint program has the number of an XSKMAP. Its structure has the
     * program's tag, a hash, where a map has the two sizes. */
    if (info.type != BPF_MAP_TYPE_XSKMAP || info.key_size != sizeof(uint32_t) || info.value_size != sizeof(uint32_t))
        return -EINVAL;
    *id = info.id;
    return (int)info.max_entries;
}

/* A signal that is pending makes the verifier give up with EAGAIN, and is delivered when the call returns: so again,
 * but not for ever. do_check() in kernel/bpf/verifier.c. */
static int prog_load(union bpf_attr *attr)
{
    int attempts = 5;
    int ret;

    do
        ret = bpf(BPF_PROG_LOAD, attr, END_OF(union bpf_attr, prog_name));
    while (ret == -EAGAIN && --attempts > 0);
    return ret;
}

int uds_redirect_prog_load(int xskmap_fd, const char *name)
{
    /* return bpf_redirect_map(xskmap, ctx->rx_queue_index, XDP_PASS), where the third argument is the verdict for
     * an empty entry (Linux 5.3). bpf-helpers(7). */
    const struct bpf_insn insns[] = {
        /* r2 = ctx->rx_queue_index: first, since r1 is the context until it becomes the map */
        {.code = BPF_LDX | BPF_MEM | BPF_W, .dst_reg = BPF_REG_2, .src_reg = BPF_REG_1,
         .off = offsetof(struct xdp_md, rx_queue_index)},
        /* r1 = the map: one instruction in two slots, in which the kernel replaces the fd by the map's address */
        {.code = BPF_LD | BPF_DW | BPF_IMM, .dst_reg = BPF_REG_1, .src_reg = BPF_PSEUDO_MAP_FD, .imm = xskmap_fd},
        {.code = 0},
        {.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_3, .imm = XDP_PASS},
        {.code = BPF_JMP | BPF_CALL, .imm = BPF_FUNC_redirect_map},
        {.code = BPF_JMP | BPF_EXIT},
    };
    union bpf_attr attr;
    int ret;

    memset(&attr, 0, sizeof attr);
    attr.prog_type = BPF_PROG_TYPE_XDP;
    attr.insns = (uintptr_t)insns;
    attr.insn_cnt = sizeof insns / sizeof insns[0];
    attr.license = (uintptr_t)"Apache-2.0"; /* bpf_redirect_map() is open to every license */
    attr.prog_flags = BPF_F_XDP_HAS_FRAGS;  /* without it drivers refuse us on devices with jumbo frames */
    copy_name(attr.prog_name, name);
    ret = prog_load(&attr);
    if (ret == -EINVAL) { /* perhaps the flag, unknown before Linux 5.18; anything else fails again */
        attr.prog_flags = 0;
        ret = prog_load(&attr);
    }
    return ret;
}

int uds_xdp_link_create(int prog_fd, unsigned int ifindex, int generic)
{
    union bpf_attr attr;

    memset(&attr, 0, sizeof attr);
    attr.link_create.prog_fd = (uint32_t)prog_fd;
    attr.link_create.target_ifindex = ifindex;
    attr.link_create.attach_type = BPF_XDP;
    /* Always one of the two: with neither the kernel falls back from native to generic and does not say so. */
    attr.link_create.flags = generic ? XDP_FLAGS_SKB_MODE : XDP_FLAGS_DRV_MODE;
    return bpf(BPF_LINK_CREATE, &attr, END_OF(union bpf_attr, link_create.flags));
}

int uds_link_update(int link_fd, int new_prog_fd)
{
    union bpf_attr attr;

    memset(&attr, 0, sizeof attr);
    attr.link_update.link_fd = (uint32_t)link_fd;
    attr.link_update.new_prog_fd = (uint32_t)new_prog_fd;
    return bpf(BPF_LINK_UPDATE, &attr, END_OF(union bpf_attr, link_update.new_prog_fd));
}

int uds_link_query(int link_fd, struct uds_link_info *info)
{
    struct bpf_link_info link;
    int ret = object_info(link_fd, &link, END_OF(struct bpf_link_info, xdp.ifindex));

    if (ret < 0)
        return ret;
    /* The type alone would not do: an XDP program has the number of an XDP link, 6, in the same place. What tells
     * them apart is that an update looks at the link first (EINVAL), then at its new program (EBADF): link_update()
     * in kernel/bpf/syscall.c. Nothing is changed, as there is no program -1. */
    if (link.type != BPF_LINK_TYPE_XDP || uds_link_update(link_fd, -1) != -EBADF)
        return -EINVAL;
    info->id = link.id;
    info->prog_id = link.prog_id;
    info->ifindex = link.xdp.ifindex;
    return 0;
}

int uds_obj_pin(int fd, const char *path)
{
    union bpf_attr attr;

    memset(&attr, 0, sizeof attr);
    attr.pathname = (uintptr_t)path;
    attr.bpf_fd = (uint32_t)fd;
    return bpf(BPF_OBJ_PIN, &attr, END_OF(union bpf_attr, bpf_fd));
}

int uds_obj_get(const char *path)
{
    union bpf_attr attr;

    memset(&attr, 0, sizeof attr);
    attr.pathname = (uintptr_t)path;
    return bpf(BPF_OBJ_GET, &attr, END_OF(union bpf_attr, pathname));
}

/* -- Messages ------------------------------------------------------------------------------------------------- */

/* Closes a descriptor that a peer sent. With SO_LINGER set on it, close() would wait for as long as the peer likes;
 * where it is no socket, the option fails and nothing is lost. socket(7). */
static void discard(int fd)
{
    const struct linger off = {0};

    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &off, sizeof off);
    (void)close(fd);
}

int uds_recv(int sock, char *buffer, unsigned int size, int *fds, unsigned int max_fds, unsigned int *n_fds,
             int *pid, unsigned int *uid, int *flags)
{
    /* Room for all that a packet can carry: how many descriptors arrive is then the peer's choice, never an accident
     * of the buffer's length and padding. cmsg(3). */
    union {
        struct cmsghdr aligned;
        char bytes[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(MAX_FDS * sizeof(int))];
    } control;
    struct iovec iov = {.iov_base = buffer, .iov_len = size};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    struct cmsghdr *cmsg;
    int has_credentials = 0;
    ssize_t length;

    *n_fds = 0;
    *pid = 0;
    *uid = (unsigned int)-1; /* nobody, above all not root */
    *flags = 0;

    do {
        msg.msg_control = &control;
        msg.msg_controllen = sizeof control;
        length = recvmsg(sock, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (length < 0 && errno == EINTR);
    if (length < 0)
        return -errno;

    for (cmsg = CMSG_FIRSTHDR(&msg); cmsg != NULL; cmsg = CMSG_NXTHDR(&msg, cmsg)) {
        if (cmsg->cmsg_level != SOL_SOCKET)
            continue;
        if (cmsg->cmsg_type == SCM_CREDENTIALS) {
            struct ucred peer;

            memcpy(&peer, CMSG_DATA(cmsg), sizeof peer);
            *pid = peer.pid;
            *uid = peer.uid;
            has_credentials = 1;
        } else if (cmsg->cmsg_type == SCM_RIGHTS) {
            size_t count = (cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int);

            for (size_t i = 0; i < count; i++) {
                int fd;

                memcpy(&fd, CMSG_DATA(cmsg) + i * sizeof fd, sizeof fd);
                if (*n_fds < max_fds)
                    fds[*n_fds] = fd;
                else
                    discard(fd);
                ++*n_fds;
            }
        }
    }

    /* Both a packet without bytes and the end of file have length 0, but with SO_PASSCRED every packet carries its
     * sender's credentials, and the end of file, which nobody sent, does not. unix(7). */
    if (length == 0 && !has_credentials)
        *flags |= FLAG_END_OF_FILE;
    if (msg.msg_flags & MSG_TRUNC)
        *flags |= FLAG_CUT;
    return (int)length;
}

int uds_send(int sock, const char *buffer, unsigned int size, int fd)
{
    union {
        struct cmsghdr aligned;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec iov = {.iov_base = (char *)buffer, .iov_len = size};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    ssize_t length;

    if (fd >= 0) {
        memset(&control, 0, sizeof control);
        msg.msg_control = &control;
        msg.msg_controllen = sizeof control;
        CMSG_FIRSTHDR(&msg)->cmsg_level = SOL_SOCKET;
        CMSG_FIRSTHDR(&msg)->cmsg_type = SCM_RIGHTS;
        CMSG_FIRSTHDR(&msg)->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(CMSG_FIRSTHDR(&msg)), &fd, sizeof fd);
    }
    do
        length = sendmsg(sock, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (length < 0 && errno == EINTR);
    return length < 0 ? -errno : 0; /* a packet is sent whole or not at all */
}

/* -- Busy polling --------------------------------------------------------------------------------------------- */

static int get_option(int sock, int option, int *value)
{
    socklen_t size = sizeof *value;

    return getsockopt(sock, SOL_SOCKET, option, value, &size) < 0 ? -errno : 0;
}

static int set_option(int sock, int option, int value)
{
    return setsockopt(sock, SOL_SOCKET, option, &value, sizeof value) < 0 ? -errno : 0;
}

int uds_busy_poll(int xsk, int timeout_us, int budget)
{
    int domain, prefer, timeout, ret;

    if ((ret = get_option(xsk, SO_DOMAIN, &domain)) < 0)
        return ret;
    if (domain != AF_XDP)
        return -EAFNOSUPPORT;
    if ((ret = get_option(xsk, SO_PREFER_BUSY_POLL, &prefer)) < 0 ||
        (ret = get_option(xsk, SO_BUSY_POLL, &timeout)) < 0)
        return ret;
    /* The budget comes last, and so never has to be put back: the kernel does not tell its value (getsockopt() gives
     * ENOPROTOOPT). */
    if ((ret = set_option(xsk, SO_PREFER_BUSY_POLL, 1)) < 0 ||
        (ret = set_option(xsk, SO_BUSY_POLL, timeout_us)) < 0 ||
        (ret = set_option(xsk, SO_BUSY_POLL_BUDGET, budget)) < 0) {
        (void)set_option(xsk, SO_PREFER_BUSY_POLL, prefer);
        (void)set_option(xsk, SO_BUSY_POLL, timeout);
    }
    return ret;
}
