// The standard streams of C++ and saved ones of C, redirected by who starts the program or, to its two arguments, by itself:
// what is read is written.
#include <cstdio>
#include <fcntl.h>
#include <iostream>
#include <string>
#include <unistd.h>

int main(int argc, char **argv)
{
	FILE *saved = stdout;
	std::string line;
	int number = 0;
	if (argc == 3) {
		dup2(open(argv[1], O_RDONLY), 0);
		dup2(open(argv[2], O_WRONLY | O_CREAT, 0644), 1);
	}
	std::cin >> number;
	std::getline(std::cin, line);
	while (std::getline(std::cin, line))
		std::cout << number++ << ": " << line << std::endl;
	std::printf("from C\n");
	std::fputs("saved", saved);
	std::fputc('\n', saved);
	std::cerr << "error " << number << '\n';
	return std::cout.good() ? 0 : 1;
}
