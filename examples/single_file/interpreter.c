/*
 * The interpreter of dist/afxdpd: Python as a library, which takes its modules from memory alone.
 *
 * launcher.c has opened what is needed: pack.py defines the descriptors FIRST_FD … KEPT_FD - 1, of the dynamic linker, of
 * this program and of the libraries, and KEPT_FD … LAST_FD, of the archive of modules and of the extension modules.
 */

#include <Python.h>

#include <fcntl.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>

static wchar_t nowhere[] = L"/";

int main(int argc, char **argv)
{
    for (int fd = FIRST_FD; fd < KEPT_FD; fd++)
        close(fd); /* what is loaded stays so */
    for (int fd = KEPT_FD; fd <= LAST_FD; fd++)
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    prctl(PR_SET_NAME, "afxdpd"); /* the kernel has taken the descriptor's number for its name */

    PyPreConfig preconfig;
    PyPreConfig_InitIsolatedConfig(&preconfig);
    preconfig.utf8_mode = 1;
    PyStatus status = Py_PreInitialize(&preconfig);
    if (PyStatus_Exception(status))
        Py_ExitStatusException(status);

    PyConfig config;
    PyConfig_InitIsolatedConfig(&config);
    config.install_signal_handlers = 1;
    config.site_import = 0;
    config.write_bytecode = 0;
    config.pathconfig_warnings = 0;
    config.parse_argv = 0;
    /* All of them, so that Python looks for nothing. */
    config.executable = config.base_executable = config.program_name = nowhere;
    config.prefix = config.base_prefix = config.exec_prefix = config.base_exec_prefix = nowhere;
    config.platlibdir = config.stdlib_dir = nowhere;
    config.module_search_paths_set = 1;
    config.run_command = L"import _single_file; _single_file.run()\n";
    char modules[32];
    snprintf(modules, sizeof modules, "/proc/self/fd/%d", KEPT_FD);
    wchar_t *path = Py_DecodeLocale(modules, NULL);
    status = PyWideStringList_Append(&config.module_search_paths, path);
    if (!PyStatus_Exception(status))
        status = PyConfig_SetBytesArgv(&config, argc, argv);
    if (!PyStatus_Exception(status))
        status = Py_InitializeFromConfig(&config);
    if (PyStatus_Exception(status))
        Py_ExitStatusException(status);
    return Py_RunMain();
}
